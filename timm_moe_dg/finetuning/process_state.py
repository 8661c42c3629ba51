"""The state of the process that a run or an evaluation changes, and that is restored at its end."""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from ..cli.arguments import default_device
from ..errors import ArgumentError, FolderInUseError

_STATES = (PartialState, AcceleratorState, GradientState)
_running = threading.Lock()


@contextmanager
def process_state_kept(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Restores random numbers, environment variables, torch's settings and accelerate's state at its end.

    Within, each call chooses its own precision: accelerate's state is empty, and torch has its defaults.

    Raises:
        FolderInUseError: Another call is in progress in this process. Both would share these states.
        ArgumentError: The caller is within torch.autocast.
    """
    if torch.is_autocast_enabled(default_device()):  # its cache would keep weights of earlier steps
        remedy = "leave this context before the call; for mixed precision give finetune amp_dtype"
        raise ArgumentError.of("torch.autocast", True, remedy)
    if not _running.acquire(blocking=False):
        remedy = "another call trains or evaluates in this process; wait until it has ended, or start a second process"
        raise FolderInUseError.of("output", str(Path(folder)), remedy)
    try:
        with _accelerate_state(), random_numbers_kept(), _settings():
            yield
    finally:
        _running.release()


@contextmanager
def _accelerate_state() -> Iterator[None]:
    saved = [dict(state._shared_state) for state in _STATES]  # there is no public way to keep it
    for state in _STATES:
        state._shared_state.clear()
    try:
        yield
    finally:
        for state, values in zip(_STATES, saved, strict=True):
            state._shared_state.clear()
            state._shared_state.update(values)


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


@contextmanager
def _settings() -> Iterator[None]:
    threads, environment, hook = torch.get_num_threads(), dict(os.environ), threading.excepthook
    number_type = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched off gradients
            yield
    finally:
        torch.set_default_dtype(number_type)
        torch.set_num_threads(threads)
        threading.excepthook = hook
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
