"""What a run says, kept in its folder's log.txt beside the screen."""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from types import TracebackType
from typing import Self, TextIO

from accelerate.utils import get_int_from_env

from ..errors import MoeDgError
from ..storage.run_folder import RunFolder
from .processes.launch import RANKS


class _Copied:
    """A text stream of which everything that is written goes to a log as well."""

    def __init__(self, stream: TextIO, log: "RunLog") -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class RunLog:
    """Copies standard output, the package's messages and how a run ends, while it is entered as a context.

    The main process writes, and nothing before the run folder is there: see `RunFolder.log`. Progress bars are on
    standard error, and are not kept.

    Args:
        words: The command line, without the program's name.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._folder: RunFolder | None = None
        self._early = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} finetune.py {shlex.join(words)}\n"]
        self._hidden = bool(get_int_from_env(RANKS, 0))
        self._handler = logging.StreamHandler(self)
        self._redirected = redirect_stdout(_Copied(sys.stdout, self))  # type: ignore[type-var] # a stream by delegation

    def __enter__(self) -> Self:
        self._redirected.__enter__()
        logging.getLogger("timm_moe_dg").addHandler(self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        logging.getLogger("timm_moe_dg").removeHandler(self._handler)
        self._redirected.__exit__(kind, error, _)
        if error is not None and not isinstance(error, SystemExit):
            self.write(f"{type(error).__name__}: {error}\n" if isinstance(error, MoeDgError) else f"{error!r}\n")

    def keep_in(self, folder: RunFolder) -> None:
        """Says whose log this is."""
        self._folder = folder
        self.write("")

    def write(self, text: str) -> int:
        """Keeps text; names that are not UTF-8 are written with their bytes as numbers."""
        self._early.append(text.encode(errors="backslashreplace").decode())
        if self._folder is not None and not self._hidden:
            self._folder.log("".join(self._early))
            self._early.clear()
        return len(text)

    def flush(self) -> None:
        """There is nothing to flush: each text is written at once."""
