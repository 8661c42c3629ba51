"""What a run that goes on has: its evaluations, from results.jsonl and the copy in the checkpoint, and its networks."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import RecordError
from ..protocols.records import Record
from .checkpoint import RunState
from .checksums import CHECKSUMS, damage
from .summary_table import SUMMARY, is_summarized

RESULTS = "results.jsonl"
_logger = logging.getLogger(__name__)


def kept_records(run: Path, checkpoint: RunState, steps: int) -> list[Record]:
    """Returns the evaluations up to a checkpoint.

    Those before it are the checkpoint's own copy; a message says which of them results.jsonl had lost. That of its very
    step was written after it: if it is not whole, and as summary.csv has it, it is left out, to be evaluated again.

    Args:
        run: The run's folder.
        checkpoint: What the run goes on from.
        steps: How many the run is to take, which may be more than when it began.

    Raises:
        RecordError: There is no copy, in a run of an earlier release, and results.jsonl has none of them.
    """
    step = checkpoint["step"]
    found = [record for record in _readable(run / RESULTS, steps) if record.step <= step and not record.averaged]
    if "records" in checkpoint:
        copy = [_lasting(Record.from_json(line), steps) for line in checkpoint["records"]]
        _say_lost(run, copy, found)
        return copy + [record for record in found if record.step == step and is_summarized(run / SUMMARY, record)]
    if not found:
        remedy = "start another run with --experiment"
        raise RecordError(f"{run / RESULTS}: holds no evaluation up to step {step}, and no copy is left; {remedy}")
    return found


def needs_remaking(folder: Path, verify: bool) -> bool:
    """Whether a network that a run selected is missing or, if that is to be verified, not what was written."""
    if verify and (folder / CHECKSUMS).exists():
        return damage(folder) is not None
    return not folder.is_dir()


def _say_lost(run: Path, copy: Sequence[Record], found: Sequence[Record]) -> None:
    there = {record.to_json() for record in found}
    lost = [str(record.step) for record in copy if record.to_json() not in there]
    if lost:
        text = f"{run / RESULTS}: the evaluations of steps {', '.join(lost)} were lost or changed"
        _logger.warning(f"{text}; taken from the checkpoint's copy")


def _readable(path: Path, steps: int) -> list[Record]:
    """Reads the lines that can be read."""
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [_lasting(record, steps) for record in map(_complete, lines) if record is not None]


def _lasting(record: Record, steps: int) -> Record:
    """The record as of a run of so many steps."""
    return replace(record, args={**record.args, "steps": steps})


def _complete(line: str) -> Record | None:
    try:
        return Record.from_json(line)
    except RecordError:
        return None
