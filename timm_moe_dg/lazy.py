"""Rooms whose names are imported when they are first used, so that who plans or tabulates runs loads no torch."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def exports(room: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes the `__getattr__` and the `__dir__` of a room's `__init__` (PEP 562).

    Its names are those that it imports below `if TYPE_CHECKING:`, where type checkers and this function read them.

    Args:
        room: The `__name__` there.
        file: The `__file__` there.
    """
    places = _places(Path(file).read_text(encoding="utf-8"))

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module = import_module(f".{places[name] or name}", room)
        found = getattr(module, name) if places[name] else module
        vars(import_module(room))[name] = found  # next time it is there
        return found

    return get, lambda: sorted({*vars(import_module(room)), *places})


def _places(source: str) -> dict[str, str]:
    """Name -> the module of the room that has it; "" where the name is a module's own."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in imports if line.level == 1 for alias in line.names}
