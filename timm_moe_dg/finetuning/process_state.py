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

from ..errors import FolderInUseError

_running = threading.Lock()


@contextmanager
def process_state_kept(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Restores random numbers, environment variables, the number of threads and accelerate's state at its end.

    Accelerate's state is empty within, so that each call chooses its own precision.

    Raises:
        FolderInUseError: Another call is in progress in this process. Both would share these states.
    """
    if not _running.acquire(blocking=False):
        remedy = "another call trains or evaluates in this process; wait until it has ended, or start a second process"
        raise FolderInUseError.of("output", str(Path(folder)), remedy)
    with ExitStack() as stack:
        stack.callback(_running.release)
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (the state that set_seed changes)
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(setattr, threading, "excepthook", threading.excepthook)  # see `silence_writer`
        stack.callback(_restore, os.environ, dict(os.environ))
        for state in (PartialState, AcceleratorState, GradientState):
            stack.callback(_restore, state._shared_state, dict(state._shared_state))  # there is no public way
            state._shared_state.clear()
        yield


def _restore(table: MutableMapping[str, Any], saved: dict[str, Any]) -> None:
    for name in table.keys() - saved.keys():
        del table[name]
    table.update(saved)
