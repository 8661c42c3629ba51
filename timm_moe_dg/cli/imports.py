"""Modules of users, which register routers, methods, data sets and losses."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module

from ..errors import ArgumentError

OPTION = "--import"


def import_modules(names: Iterable[str]) -> None:
    """Imports modules from the working directory or from where Python finds them.

    Raises:
        ArgumentError: There is no module of this name.
    """
    for name in names:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that no file there hides an installed module
        try:
            import_module(name)
        except (ModuleNotFoundError, ValueError, TypeError) as error:  # ValueError, TypeError: no name of a module
            missing = getattr(error, "name", None)
            if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{missing}."):
                raise  # the module exists, and an import inside it fails
            remedy = f"no such module in {os.getcwd()!r} or on PYTHONPATH; give its name without .py, such as my_router"
            raise ArgumentError.of("import", name, remedy) from None


def named_imports(words: Sequence[str]) -> list[str]:
    """Returns the modules that a command line names, before a word `--`."""
    words = list(words[: words.index("--")]) if "--" in words else list(words)
    pairs = zip(words, [*words[1:], ""], strict=False)
    return [
        value if word == OPTION else word.partition("=")[2]
        for word, value in pairs
        if (word == OPTION and value) or word.startswith(f"{OPTION}=")
    ]


class ImportAction(argparse.Action):
    """Imports a module and keeps its name, at once: the file of options that names it may need it."""

    def __call__(self, _: object, namespace: argparse.Namespace, value: object, __: object = None) -> None:
        """Takes the option's value, as argparse calls it."""
        import_modules([str(value)])
        namespace.imports = [*getattr(namespace, "imports", ()), str(value)]
