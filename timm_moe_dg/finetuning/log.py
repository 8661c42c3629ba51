"""The messages of a run, on the screen and in the log.txt of its folder."""

import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from accelerate.utils import get_int_from_env
from tqdm.auto import tqdm

from ..cli.arguments import call_text, option_words
from ..cli.text import one_line
from ..cli.tool import OPTION, command, named_imports, program
from ..errors import MoeDgError, RunInterruptedError
from ..storage.atomic import explained
from ..storage.run_folder import LOG, RunFolder
from .plan import RunPlan
from .sharding import is_sharded

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_logger = logging.getLogger("timm_moe_dg")


def is_main_rank() -> bool:
    """Whether the environment names this process as the first one, or names none."""
    return not get_int_from_env(_RANKS, 0)


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
    is logged and not shown, or `call`, the Python call in its place.
    """

    def __init__(self, words: Sequence[str], call: str | None = None) -> None:
        super().__init__(capacity=sys.maxsize)
        self._words, self._call = words, call
        self.folder: RunFolder | None = None  # of the run, which sets it before it exists
        # Rank comes from the environment: the process group does not exist yet
        self._is_main = is_main_rank()
        self._screen = _Screen()
        self._screen.setFormatter(_Escaped())
        started = call or f"{program('finetune.py')} {shlex.join(words)}"
        self._log(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {started}")

    def __enter__(self) -> Self:
        self._level = _logger.level
        _logger.setLevel(logging.INFO if self._is_main else logging.ERROR)
        _logger.addHandler(self._screen)
        _logger.addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _logger.removeHandler(self)
        _logger.removeHandler(self._screen)
        _logger.setLevel(self._level)
        if error is not None and not isinstance(error, RunInterruptedError):  # logged by the run
            # The screen gets it from the tool
            self._log(f"{type(error).__name__}: {error}" if isinstance(error, MoeDgError) else repr(error))
        if self.target is not None:
            self.target.close()

    def go_on(self, plan: RunPlan, num_processes: int) -> str:
        """Returns the command or call that continues a run."""
        path, algorithm = str(plan.folder.path), plan.options.algorithm
        imports = named_imports(self._words)
        method_words = {"algorithm": algorithm} if ":" in algorithm else {}  # a run folder names no code
        if self._call:
            return call_text("finetune", {"resume": path, **method_words, **({"imports": imports} if imports else {})})
        launched = num_processes > 1 or "ACCELERATE_MIXED_PRECISION" in os.environ
        flags = " --use_fsdp --fsdp_version 2" if is_sharded() else ""
        if precision := plan.folder.args.get("mixed_precision"):
            flags += f" --mixed_precision {precision}"
        launcher = f"accelerate launch{flags}" if launched else "python"
        words = [path, *(word for pair in method_words.items() for word in option_words(*pair))]
        words += [word for name in imports for word in (OPTION, name)]
        return f"{command('finetune', launcher)} --resume {shlex.join(words)}"

    def shouldFlush(self, record: logging.LogRecord) -> bool:  # noqa: N802 (logging's name)
        """Whether messages can be written. Until its first evaluation the run has no folder, or one to be replaced."""
        folder = self.folder
        if self.target is None and self._is_main and folder is not None and folder.records and folder.path.is_dir():
            self.target = _LogFile(folder.path / LOG, encoding="utf-8", errors="backslashreplace")
            self.target.setFormatter(_Escaped())
        return self.target is not None

    def _log(self, text: str) -> None:
        self.handle(logging.LogRecord(_logger.name, logging.INFO, __file__, 0, text, None, None))
