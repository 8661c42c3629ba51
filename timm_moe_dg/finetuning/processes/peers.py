"""A watch over the other processes of a run, so that none waits for one that is gone."""

import logging
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed

from ...errors import MoeDgError

EVERY = 1.0  # seconds between two exchanges
SILENCE = 120.0  # seconds; a machine that loses its power or its network closes no connection
GRACE = 5.0  # seconds in which the process ends by itself once another is gone
_AT_WORK, _DONE, _FAILED = 0, 1, 2
_logger = logging.getLogger(__name__)


class PeerWatch:
    """Ends this process with one line when another one of its run is gone; entered as a context by all of them.

    A thread exchanges a number with the others, over gloo and in a group of its own, so that it neither disturbs
    training nor waits for an accelerator. A process that is killed closes its connections, which the others notice at
    the next exchange; one that falls silent is given `silence`.

    Args:
        num_processes: Of the run; one has nobody to watch.
        silence: Seconds without a word from a process that is taken to be alive. All processes of a machine may be
            suspended for so long.
    """

    def __init__(self, num_processes: int, silence: float = SILENCE) -> None:
        self._leaving, self._lost = threading.Event(), threading.Event()
        self._code = _AT_WORK
        self._silence = silence
        self._num_processes = num_processes
        self._group: Any = None  # torch does not type it
        self._thread = threading.Thread(target=self._exchange, daemon=True)

    def __enter__(self) -> Self:
        if self._num_processes > 1:
            self._group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=self._silence))
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._group is None:
            return
        # The libraries for communication have no class of error in common, and the thread knows within an exchange
        if isinstance(error, RuntimeError) and not isinstance(error, MoeDgError) and self._lost.wait(GRACE):
            self._end(f" (here: {error})")
        self._code = _DONE if kind is None or issubclass(kind, SystemExit) else _FAILED
        self._leaving.set()
        self._thread.join(GRACE)

    def _exchange(self) -> None:
        """Tells the others that this process is at work, until one of them leaves or is gone."""
        worst = torch.tensor(_AT_WORK)
        while worst == _AT_WORK:
            worst.fill_(self._code if self._leaving.wait(EVERY) else _AT_WORK)
            try:
                distributed.all_reduce(worst, distributed.ReduceOp.MAX, group=self._group)
            except RuntimeError:
                worst.fill_(_FAILED)
        if worst == _FAILED:
            self._lost.set()
            if not self._leaving.wait(GRACE):  # in a collective operation that does not end, most likely
                self._end()

    def _end(self, seen: str = "") -> None:
        """Says why and ends at once: Python's own way out waits for connections to those that are gone."""
        _logger.error(
            f"{Path(sys.argv[0]).name}: num_processes={self._num_processes}: another one of them was killed, failed or "
            f"has not answered for {self._silence:.0f} s; see what it has said, and start all again with --resume{seen}"
        )
        sys.stdout.flush()
        os._exit(1)
