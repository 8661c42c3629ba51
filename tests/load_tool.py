"""Loads scripts of tools/ and examples/ as modules, runs them, and reads the tables that they write."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"


def load_tool(name: str) -> ModuleType:
    """Imports tools/NAME.py without running its `main`."""
    return _load(TOOLS / f"{name}.py")


def load_example(name: str) -> ModuleType:
    """Imports examples/NAME.py likewise. It may import the modules of its folder by name."""
    path = ROOT / "examples" / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    return _load(path)


def _load(path: Path) -> ModuleType:
    # Several examples have a make_data.py
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_tool(name: str, *words: object) -> None:
    """Runs the command line of tools/NAME.py in this process."""
    load_tool(name).main([*map(str, words)])


def read_rows(path: Path) -> list[dict[str, str]]:
    """Reads the rows of a CSV file by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
