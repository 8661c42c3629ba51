"""The command line of a run, and of one that goes on: which run is meant, and whether anything is left of it to do."""

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..cli.arguments import from_parsed, parse_arguments
from ..errors import ArgumentError, CheckpointError
from ..protocols.options import NO_EFFECT_ON_RESULTS, Arguments, RunOptions
from ..protocols.run_identity import canonical_json, read_arguments, read_repeatable, with_defaults
from ..storage.checkpoint import Checkpoints
from ..storage.outcome import DONE, lost
from ..storage.ownership import is_owned, start_number
from ..storage.run_folder import ARGUMENTS

AUTO = "auto"
_logger = logging.getLogger(__name__)
_UNSAID = NO_EFFECT_ON_RESULTS - {"epochs"}


def parse_resumable(parser: argparse.ArgumentParser, argv: Sequence[str]) -> RunOptions:
    """Parses a command line with `--resume`; options that it does not mention are those of the run to go on with.

    Args:
        parser: From `run_parser`.
        argv: The command line, without the program's name.

    Raises:
        ArgumentError: `--resume` names a folder that is no run; or as `parse_arguments`.
        FormatError: What it goes on from is of another format.
    """
    args = parse_arguments(parser, argv, read=read_repeatable)
    run = None if args.resume is None else run_to_resume(args.resume, Path(args.output), args.experiment)
    if run is not None:
        args = parse_arguments(parser, argv, run / ARGUMENTS, read=read_repeatable)
        args.output, args.experiment = str(run.parent), run.name
    return from_parsed(RunOptions, vars(args))


def run_to_resume(resume: str, output: Path, experiment: str | None) -> Path | None:
    """Finds the run that `--resume` speaks of.

    Args:
        resume: A run folder, or "auto" for `experiment`, and without that for the unfinished run that was begun or
            resumed last, of those that no process is at.
        output: Folder of all runs.
        experiment: Name of a run in it.

    Returns:
        The run's folder, or None if `experiment` was not begun yet.

    Raises:
        ArgumentError: The folder given is no run's, or there is no unfinished run to choose.
    """
    if resume != AUTO:
        if not (Path(resume) / ARGUMENTS).exists():
            raise ArgumentError.of("resume", resume, f"is not the folder of a run; give one that holds {ARGUMENTS}")
        return Path(resume)
    if experiment is not None:
        run = output / experiment
        return run if (run / ARGUMENTS).exists() else None
    runs = (path.parent for path in output.glob("*/checkpoints"))
    begun = [run for run in runs if not (run / DONE).exists() and not is_owned(run)]
    if not begun:
        remedy = (
            f"there is no unfinished run below {str(output)!r}; name a folder, or the run to start with --experiment"
        )
        raise ArgumentError.of("resume", resume, remedy)
    return max(begun, key=lambda run: (start_number(run), (run / "checkpoints").stat().st_mtime))


def nothing_to_do(options: RunOptions) -> str | None:
    """Says that the run which is to be resumed is finished, and what of the options is ignored therefore.

    Returns:
        One line; None if there is something to do: the run is not finished, has lost something that checkpoints may
        bring back, or is asked for more steps and can take them.

    Raises:
        CheckpointError: The run has lost something for good.
    """
    if options.resume is None or options.experiment is None:
        return None
    run = Path(options.output, options.experiment)
    if not (run / DONE).exists():
        return None
    if options.verify and (missing := lost(run)):
        if Checkpoints(run / "checkpoints").newest():
            _logger.warning(f"{run} is finished, but {missing}; what can be is made again")
            return None
        remedy = "nothing is left to make it again from; run it again under another --experiment, or see --no-verify"
        raise CheckpointError(f"resume={str(run)!r}: is finished, but {missing}; {remedy}")
    recorded = with_defaults(read_arguments(run / ARGUMENTS, "resume"))
    steps, epochs = (float(str(recorded[name] or 0)) for name in ("steps", "epochs"))
    longer = (options.steps or 0) > steps or (options.epochs or 0) > epochs
    obstacle = _obstacle(run, recorded)
    if longer and not obstacle:
        return None
    if not can_be_extended(recorded):
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # left by a kill between `done` and their removal
    said = {name: value for name, value in vars(options).items() if value is not None and name not in _UNSAID}
    ignored = [
        f"{name}={said[name]!r}" for name in said if canonical_json(said[name]) != canonical_json(recorded[name])
    ]
    reason = f" ({obstacle})" if longer else ""
    remark = f"; ignored: {', '.join(ignored)}{reason}" if ignored else ""
    return f"{run} is finished: nothing to do{remark}"


def can_be_extended(args: Arguments) -> bool:
    """Whether the steps that a run took would have been the same, had more of them been asked for."""
    return not (args["sched"] or args["averaging"] or args["early_stop"])


def _obstacle(run: Path, recorded: Arguments) -> str | None:
    """Why a finished run cannot take further steps, if it cannot."""
    if not can_be_extended(recorded):
        ends = {"sched": "schedule", "averaging": "average", "early_stop": "early stop"}
        kind = " and ".join(f"its {words} ({recorded[name]})" for name, words in ends.items() if recorded[name])
        return f"{kind} goes with the {recorded['steps']} steps that it was begun with"
    return None if Checkpoints(run / "checkpoints").newest() else "its last checkpoint is not there"
