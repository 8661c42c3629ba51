"""The state of the process that a run or an evaluation changes, and that is restored at its end."""

import os
import random
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from ..cli.arguments import refuse_autocast
from ..errors import FolderInUseError

_running = threading.Lock()


@contextmanager
def process_state_kept(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Restores random numbers, environment variables, torch's settings and accelerate's state at its end.

    Within, each call chooses its own precision: accelerate's state is empty, and torch has its defaults.

    Raises:
        FolderInUseError: Another call is in progress in this process. Both would share these states.
        ArgumentError: The caller is within torch.autocast.
    """
    refuse_autocast()
    if not _running.acquire(blocking=False):
        remedy = "another call trains or evaluates in this process; wait until it has ended, or start a second process"
        raise FolderInUseError.of("output", str(Path(folder)), remedy)
    with ExitStack() as stack:
        stack.callback(_running.release)
        for state in (PartialState, AcceleratorState, GradientState):
            stack.callback(_restore, state._shared_state, dict(state._shared_state))  # there is no public way
            state._shared_state.clear()
        stack.enter_context(random_numbers_kept())
        stack.callback(_restore, os.environ, dict(os.environ))
        stack.callback(setattr, threading, "excepthook", threading.excepthook)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())  # the caller may have switched off gradients
        yield


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restores the states of Python's, numpy's and torch's random numbers at its end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that set_seed changes)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _restore(table: MutableMapping[str, Any], saved: dict[str, Any]) -> None:
    for name in table.keys() - saved.keys():
        del table[name]
    table.update(saved)
