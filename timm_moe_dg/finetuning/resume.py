"""Going on with a run that was ended before it finished: which one, and whether it is still the same run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..cli.arguments import parse_arguments
from ..errors import ArgumentError

AUTO = "auto"


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
