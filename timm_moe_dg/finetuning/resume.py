"""The command line of a run, and of one that goes on: which run is meant, and whether anything is left of it to do."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..algorithms import ALGORITHMS, AVERAGING
from ..cli.arguments import parse_arguments
from ..cli.options import from_parsed
from ..errors import ArgumentError
from ..networks.freeze import FREEZABLE
from ..protocols.formats import read_repeatable
from ..protocols.options import RunOptions, add_run_options
from ..storage.run_folder import ARGUMENTS
from .launch import PRECISIONS
from .optimization import SCHEDULES

AUTO = "auto"
NAMES = {
    "algorithm": ALGORITHMS,
    "averaging": AVERAGING,
    "freeze": FREEZABLE,
    "sched": SCHEDULES,
    "amp_dtype": PRECISIONS,
}


def run_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Builds the command line of tools/finetune.py."""
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser, NAMES)
    return parser


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
        resume: A run folder, or "auto" for `experiment`, and without that for the newest unfinished run.
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
    begun = [path.parent for path in output.glob("*/checkpoints") if not (path.parent / "done").exists()]
    if not begun:
        remedy = (
            f"there is no unfinished run below {str(output)!r}; name a folder, or the run to start with --experiment"
        )
        raise ArgumentError.of("resume", resume, remedy)
    return max(begun, key=lambda run: (run / "checkpoints").stat().st_mtime)


def is_finished(options: RunOptions) -> bool:
    """Whether the run that is to be resumed has nothing left to do."""
    named = options.resume is not None and options.experiment is not None
    return named and Path(options.output, options.experiment, "done").exists()
