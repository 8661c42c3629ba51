"""Endings of the tools: a mistake in the command line or the data is one line, without a traceback."""

import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path

from ..errors import MoeDgError, RunInterruptedError
from .escape import one_line
from .imports import import_modules, named_imports
from .program import program

BROKEN_PIPE, CTRL_C, TERMINATED = 128 + 13, 128 + 2, 128 + 15  # what shells report for SIGPIPE, SIGINT and SIGTERM
LONGEST = 4000  # characters of a message


def tool(main: Callable[[Sequence[str]], object]) -> Callable[..., None]:
    """Decorates the `main` function of a tool, which takes the command line without the program's name.

    A `MoeDgError` ends the process with status 1 and one line that starts with the tool's name. A closed pipe
    (`| head`) and Ctrl-C end it without a traceback, with the usual statuses.
    """

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> None:
        name = program(Path(main.__code__.co_filename).name)
        # File names may hold bytes that are not UTF-8, and printing them would raise an error
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        words = sys.argv[1:] if argv is None else argv
        try:
            import_modules(named_imports(words))  # before the parser, whose choices are registered names
            main(words)
            sys.stdout.flush()
        except RunInterruptedError as end:  # its message was shown by the run
            if argv is None:
                end_at_once(end.exit_code)
            raise SystemExit(end.exit_code) from None
        except MoeDgError as error:
            raise SystemExit(_shorten(f"{name}: {explain(error)}")) from error
        except BrokenPipeError:
            # Python flushes stdout at exit, which would fail a second time
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(BROKEN_PIPE) from None
        except OSError as error:  # of a path that no check has seen, such as one that is too long
            if error.filename is None or error.errno is None:  # a network error, whose file may be a URL, or a bug
                raise
            raise SystemExit(_shorten(f"{name}: {error}; check the path, its permissions and the disk")) from error
        except RuntimeError as error:
            # torch's for GPUs, by name, since `--help` does not import torch; that for a CPU has no class of its own
            if type(error).__name__ != "OutOfMemoryError" and "can't allocate memory" not in str(error):
                raise
            raise SystemExit(_shorten(f"{name}: memory is full; give a smaller --batch-size ({error})")) from error
        except KeyboardInterrupt as interrupt:
            sys.stderr.write(f"{name}: {str(interrupt) or 'interrupted'}\n")
            if argv is None:
                end_at_once(CTRL_C)
            raise SystemExit(CTRL_C) from None
        except SystemExit as end:
            if argv is None and end.code in (CTRL_C, TERMINATED):
                end_at_once(end.code)
            raise

    return run


def end_at_once(status: int) -> None:
    """Ends the process and its loaders' workers without Python's cleanup, which takes seconds after importing torch."""
    for worker in multiprocessing.active_children():
        worker.terminate()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a closed pipe
            stream.flush()
    os._exit(status)


def explain(error: MoeDgError) -> str:
    """Returns the name and message of an error, without the traceback that a loader's worker adds."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.rstrip().splitlines()[-1].partition(f"{type(error).__name__}: ")[2]
    return f"{type(error).__name__}: {text}"


def _shorten(text: str) -> str:
    """Joins the lines of a message and limits its length, because messages of libraries quote whole files."""
    text = one_line(" ".join(text.split()) if "\n" in text else text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def duration(seconds: float) -> str:
    """Formats an estimated time in seconds, such as "about 5 min"."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 120 else f"about {hours} h"
