"""How every tool ends: a mistake in its command line or its data is one line, not a traceback."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Protocol, TextIO

from ..errors import MoeDgError

BROKEN_PIPE, CTRL_C = 128 + 13, 128 + 2  # what shells report for SIGPIPE and SIGINT
LONGEST = 4000  # characters of a message


class Program(Protocol):
    """A program's `main`."""

    def __call__(self, argv: Sequence[str] | None = None) -> None:
        """Runs it on a command line, by default the process's own."""


def tool(main: Callable[[Sequence[str]], object]) -> Program:
    """Turns a function of a command line into a program's `main`, which may be called without one.

    A mistake ends with one line that names the program, and exit status 1; a reader that goes away (`| head`) and
    Ctrl-C end quietly, with the statuses that shells know.

    Args:
        main: Takes the command line, without the program's name.
    """
    name = Path(main.__code__.co_filename).name

    @wraps(main)
    def run(argv: Sequence[str] | None = None) -> None:
        _print_any_name(sys.stdout)
        try:
            main(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()
        except MoeDgError as error:
            raise SystemExit(_line(f"{name}: {explain(error)}")) from error
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
            raise SystemExit(BROKEN_PIPE) from None
        except KeyboardInterrupt as interrupt:
            sys.stderr.write(f"{name}: {str(interrupt) or 'interrupted'}\n")
            raise SystemExit(CTRL_C) from None

    return run


def _print_any_name(stream: TextIO) -> None:
    """Lets a stream take file names that are not UTF-8, rather than raise in the middle of a table."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def explain(error: MoeDgError) -> str:
    """Name and message of a mistake; where a loader's worker wrapped its traceback around them, without that."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.rstrip().splitlines()[-1].partition(f"{type(error).__name__}: ")[2]
    return f"{type(error).__name__}: {text}"


def _line(text: str) -> str:
    """One line of bearable length: messages of other libraries quote whole files, line breaks included."""
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def duration(seconds: float) -> str:
    """Formats an estimated time in seconds, such as "about 5 min"."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 120 else f"about {hours} h"
