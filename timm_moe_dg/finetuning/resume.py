"""Resuming a run: the command line, the run that it means, the lock of its folder, and the checkpoint to go on from."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..cli.arguments import from_parsed, parse_arguments
from ..cli.tool import ToolParser
from ..errors import ArgumentError, ProcessLostError
from ..protocols.options import Arguments, RunOptions
from ..protocols.run_identity import check_unchanged, read_arguments, read_repeatable, with_defaults
from ..storage.files import is_owned, owned
from ..storage.run_folder import ARGUMENTS, DONE, Checkpoints, RunState
from .plan import RunPlan

AUTO = "auto"
_ENDS = {"sched": "schedule", "averaging": "average", "early_stop": "early stop"}  # options that depend on the steps


def parse_resumable(parser: ToolParser, argv: Sequence[str], keywords: Arguments | None = None) -> RunOptions:
    """Parses a command line, or takes keywords. With `resume`, other options are those of the run to resume."""
    parse = partial(parse_arguments, parser, argv, read=read_repeatable, keywords=keywords or {})
    args = parse()
    run = None if args.resume is None else run_to_resume(args.resume, Path(args.output), args.experiment)
    if run is not None:
        given = args.algorithm
        args = parse(saved=run / ARGUMENTS)
        # Importing a module runs it, and a run folder may come from anybody
        if ":" in args.algorithm and args.algorithm != given:
            remedy = f"{run / ARGUMENTS} names code; if you trust it, add --algorithm {shlex.quote(args.algorithm)}"
            raise ArgumentError.of("algorithm", args.algorithm, remedy)
        args.output, args.experiment = str(run.parent), run.name
    return from_parsed(RunOptions, vars(args))


def run_to_resume(resume: str, output: Path, experiment: str | None) -> Path | None:
    """Finds the folder of the run that `--resume` means; None if `experiment` has not started yet.

    "auto" means the run called `experiment`. Without that, it means the unfinished run with the newest checkpoint, of
    those that no process is running.
    """
    if resume != AUTO:
        if not (Path(resume) / ARGUMENTS).exists():
            raise ArgumentError.of("resume", resume, f"is not the folder of a run; give one that holds {ARGUMENTS}")
        return Path(resume)
    if experiment is not None:
        run = output / experiment
        return run if (run / ARGUMENTS).exists() else None
    runs = (path.parent for path in output.glob("*/checkpoints"))
    unfinished = [run for run in runs if not (run / DONE).exists() and not is_owned(run)]
    if not unfinished:
        remedy = f"there is no unfinished run below {str(output)!r}; name one, or the run to start with --experiment"
        raise ArgumentError.of("resume", resume, remedy)
    return max(unfinished, key=lambda run: (run / "checkpoints").stat().st_mtime)


def nothing_to_do(options: RunOptions) -> str | None:
    """Names a finished run, and why it takes no more steps if they are asked for; None if there are steps to take."""
    if options.resume is None or options.experiment is None:
        return None
    run = Path(options.output, options.experiment)
    if not (run / DONE).exists():
        return None
    is_owned(run)  # removes the lock of a process that was killed after its last file
    recorded = with_defaults(read_arguments(run / ARGUMENTS, "resume"))
    steps, epochs = (float(str(recorded[name] or 0)) for name in ("steps", "epochs"))
    longer = (options.steps or 0) > steps or (options.epochs or 0) > epochs
    obstacle = _obstacle(run, recorded)
    if longer and not obstacle:
        return None
    if not can_be_extended(recorded):
        # A kill after `done` was written leaves them
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    reason = f" ({obstacle})" if longer else ""
    return f"{run} is finished: nothing to do{reason}"


def can_be_extended(args: Arguments) -> bool:
    """Whether a run's steps would have been the same if more of them had been asked for."""
    return not any(args[name] for name in _ENDS)


def _obstacle(run: Path, recorded: Arguments) -> str | None:
    """Why a finished run cannot take more steps; None if it can."""
    if not can_be_extended(recorded):
        kind = " and ".join(f"its {words} ({recorded[name]})" for name, words in _ENDS.items() if recorded[name])
        return f"{kind} goes with the {recorded['steps']} steps that it was begun with"
    return None if Checkpoints(run / "checkpoints").newest() else "its last checkpoint is not there"


@contextmanager
def lock_folder(plan: RunPlan, accelerator: Accelerator) -> Iterator[RunPlan]:
    """Holds the lock of the run folder, on the main process, until the context is left. All processes enter it.

    If the main process raises an error, the others exit. A dry run writes nothing and takes no lock.
    """
    with ExitStack() as stack:
        locked = [plan.options.dry_run]
        try:
            if accelerator.is_main_process and not plan.options.dry_run:
                stack.enter_context(owned(plan.folder.path))
                plan = plan.reopened()
                locked = [True]
        finally:
            broadcast_object_list(locked)
        if not locked[0]:
            raise ProcessLostError("the main process did not start the run; see its own message")
        yield plan


@dataclass(frozen=True)
class ResumePoint:
    """The point where a process starts or resumes a run."""

    identity: Arguments  # everything that determines the run's numbers
    checkpoint: RunState | None
    first_step: int


def find_resume_point(plan: RunPlan, accelerator: Accelerator) -> ResumePoint:
    """Reads the newest checkpoint, if there is one, and checks that it belongs to this run."""
    checkpoint = plan.folder.newest_checkpoint()
    identity = plan.identity(num_processes=accelerator.num_processes, mixed_precision=accelerator.mixed_precision)
    if checkpoint is not None:
        # A run that is extended has more steps. args.yaml is compared as a whole and says so if that is not allowed.
        check_unchanged({**checkpoint["identity"], "steps": identity["steps"]}, identity)
    return ResumePoint(identity, checkpoint, 0 if checkpoint is None else checkpoint["step"] + 1)
