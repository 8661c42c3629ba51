"""The messages of a run, on the screen and in the log.txt of its folder."""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from accelerate.utils import get_int_from_env
from tqdm import tqdm

from ..cli.escape import one_line
from ..cli.program import program
from ..errors import MoeDgError
from ..storage.atomic import explained
from ..storage.run_folder import LOG, RunFolder

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_logger = logging.getLogger("timm_moe_dg")


class _Escaped(logging.Formatter):
    """Escapes the names in a message, and keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(one_line, super().format(record).split("\n")))


class _Screen(logging.Handler):
    """Prints messages above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> NoReturn:  # noqa: N802 (logging's name)
        # By default logging prints a traceback and goes on, for example on a full disk
        with explained(Path(self.baseFilename)):
            raise


class RunLog(MemoryHandler):
    """Shows the package's messages, and writes them to log.txt once the run folder exists.

    Only the main process writes, and the others show nothing but errors. Progress bars are not logged. The command line
    is logged and not shown.
    """

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(capacity=sys.maxsize)
        self._folder: RunFolder | None = None
        # Rank comes from the environment: the process group does not exist yet
        self._is_main = not get_int_from_env(_RANKS, 0)
        self._screen = _Screen()
        self._screen.setFormatter(_Escaped())
        self._log(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {program('finetune.py')} {shlex.join(words)}")

    def __enter__(self) -> Self:
        _logger.setLevel(logging.INFO if self._is_main else logging.ERROR)
        _logger.addHandler(self._screen)
        _logger.addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _logger.removeHandler(self)
        _logger.removeHandler(self._screen)
        if error is not None and not isinstance(error, SystemExit):
            # The screen gets it from the tool
            self._log(f"{type(error).__name__}: {error}" if isinstance(error, MoeDgError) else repr(error))
        if self.target is not None:
            self.target.close()

    def keep_in(self, folder: RunFolder) -> None:
        """Sets the run folder, which need not exist yet."""
        self._folder = folder

    def shouldFlush(self, record: logging.LogRecord) -> bool:  # noqa: N802 (logging's name)
        """Whether messages can be written. Until its first evaluation the run has no folder, or one to be replaced."""
        folder = self._folder
        if self.target is None and self._is_main and folder is not None and folder.records and folder.path.is_dir():
            self.target = _LogFile(folder.path / LOG, encoding="utf-8", errors="backslashreplace")
            self.target.setFormatter(_Escaped())
        return self.target is not None

    def _log(self, text: str) -> None:
        self.handle(logging.LogRecord(_logger.name, logging.INFO, __file__, 0, text, None, None))
