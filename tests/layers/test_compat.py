"""Private names of torch and timm stand in compat.py alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "timm")


def dotted(node: ast.expr) -> str:
    """Returns a chain of attributes as text, "" if it does not start at a name."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return base and f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> Iterator[str]:
    """Finds names of the libraries with a part that starts with an underscore, imported or written as attributes."""
    modules = {}  # of the libraries, by the names that the file gives them
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            modules |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            names = [f"{modules[first]}.{rest}"] if first in modules else []
        for name in names:
            library, *parts = name.split(".")
            if library in LIBRARIES and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def test_no_other_file_uses_private_names_of_torch_and_timm() -> None:
    files = [path for folder in ("timm_moe_dg", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    users = {path.relative_to(ROOT).as_posix() for path in files if any(private_names(path.read_text()))}
    assert users == {"timm_moe_dg/layers/compat.py"}
