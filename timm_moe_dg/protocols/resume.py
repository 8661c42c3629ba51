"""Going on with a run that was ended before it finished: which one, and whether it is still the same run."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .command_line import parse_arguments

AUTO = "auto"
# What has no part in the numbers. Moved data is recognised by its content, see `Plan.identity` in run_plan.py
_PLACES = ("config", "data_dir", "experiment", "filled_in", "output", "resume")
_MEANS = ("cpu_threads", "log_tensorboard", "log_wandb", "save_freq", "workers")
FREE = frozenset((*_PLACES, *_MEANS))


def parse_resumable(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line with `--resume`; options that it does not mention are those of the run to go on with.

    Args:
        parser: Has options `--config`, `--resume`, `--output` and `--experiment`.
        argv: The command line, without the program's name.

    Raises:
        ArgumentError: `--resume` names a folder that is no run; or as `parse_arguments`.
    """
    args = parse_arguments(parser, argv)
    run = None if args.resume is None else run_to_resume(args.resume, Path(args.output), args.experiment)
    if run is None:
        return args
    args = parse_arguments(parser, argv, run / "args.yaml")
    args.output, args.experiment = str(run.parent), run.name
    return args


def run_to_resume(resume: str, output: Path, experiment: str | None) -> Path | None:
    """Finds the run that `--resume` speaks of.

    Args:
        resume: A run folder, or "auto" for `experiment`, and without that for the newest unfinished run.
        output: Folder of all runs.
        experiment: Name of a run in it.

    Returns:
        The run's folder, or None if `experiment` was not begun yet.

    Raises:
        ArgumentError: The folder given is no run's, or there is no unfinished run to choose.
    """
    if resume != AUTO:
        if not (Path(resume) / "args.yaml").exists():
            raise ArgumentError.of("resume", resume, "is not the folder of a run; give one that holds args.yaml")
        return Path(resume)
    if experiment is not None:
        run = output / experiment
        return run if (run / "args.yaml").exists() else None
    begun = [path.parent for path in output.glob("*/checkpoints") if not (path.parent / "done").exists()]
    if not begun:
        remedy = (
            f"there is no unfinished run below {str(output)!r}; name a folder, or the run to start with --experiment"
        )
        raise ArgumentError.of("resume", resume, remedy)
    return max(begun, key=lambda run: (run / "checkpoints").stat().st_mtime)


def is_finished(args: argparse.Namespace) -> bool:
    """Whether the run that is to be resumed has nothing left to do."""
    named = args.resume is not None and args.experiment is not None
    return named and Path(args.output, args.experiment, "done").exists()


def check_unchanged(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Makes sure that a run goes on as it began.

    Args:
        recorded: The run's arguments by name.
        asked: Those of the command line.

    Raises:
        ArgumentError: One that has a part in the numbers differs; the message gives the old and the new value.
    """
    recorded, asked = (json.loads(json.dumps(dict(arguments))) for arguments in (recorded, asked))
    for name in sorted((recorded.keys() | asked.keys()) - FREE):
        old, new = recorded.get(name), asked.get(name)
        if old != new:
            remedy = f"the run to resume was started with {old!r}; use that, or start another run with --experiment"
            raise ArgumentError.of(name, new, remedy)
