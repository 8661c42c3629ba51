"""A run as the only one that writes to its folder, over all its processes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..errors import ArgumentError
from ..storage.ownership import owned
from .plan import RunPlan, run_names


@contextmanager
def owning(plan: RunPlan, accelerator: Accelerator) -> Iterator[RunPlan]:
    """Lets the run own its folder until the context is left; all processes enter it, and the main one is the owner.

    A dry run, which writes nothing, owns nothing.

    Args:
        plan: Of the run. The folder is looked at again, for it may have been filled meanwhile.
        accelerator: The processes.

    Yields:
        The plan; its name has a number if the name that was made up had been taken.

    Raises:
        ArgumentError: Another process owns the folder, or it holds something else by now.
        StorageError: Nothing can be written there.
        SystemExit: The main process has raised one of these.
    """
    if plan.options.dry_run:
        yield plan
        return
    with ExitStack() as stack:
        name: list[str | None] = [None]
        try:
            if accelerator.is_main_process:
                name = [_claimed(plan, stack)]
        finally:
            broadcast_object_list(name)
        if name[0] is None:
            raise SystemExit(1)  # the main process says why
        yield plan.named(name[0])


def _claimed(plan: RunPlan, stack: ExitStack) -> str:
    """Owns the folder of the first name that is free, and returns that."""
    options = plan.options
    for name in run_names(options):
        try:
            with ExitStack() as attempt:
                attempt.enter_context(owned(Path(options.output, name)))
                plan.named(name)
                stack.enter_context(attempt.pop_all())
            return name
        except ArgumentError:  # taken
            if "experiment" not in options.filled_in:
                raise
    raise AssertionError("made-up names do not end")
