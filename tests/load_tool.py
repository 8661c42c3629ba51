"""Loads scripts of tools/ as modules, runs them, and reads the tables that they write."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    """Imports tools/NAME.py without running its `main`."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
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
