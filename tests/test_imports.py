"""Imports run one way, from floor to floor; rooms on one floor do not know each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "timm_moe_dg"
LEVELS = {
    "errors": 0,
    **dict.fromkeys(("layers", "metrics", "data", "cli", "conversion"), 1),
    "losses": 2,  # they judge what layers report
    **dict.fromkeys(("models", "algorithms", "networks"), 3),
    "protocols": 4,  # its options list the methods and the parts that can be frozen
    **dict.fromkeys(("results", "storage"), 5),
    **dict.fromkeys(("finetuning", "sweeping", "analysis", "hub", "export"), 6),
    **dict.fromkeys(("report", "measure"), 7),
}

ABOVE_ALL = ("__init__",)  # what importing the package does


def imported_rooms(path: Path) -> set[str]:
    """The rooms of the package that a file imports from, its own left out."""
    here = path.relative_to(PACKAGE).parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ("timm_moe_dg", *here[: len(here) - node.level]) if node.level else ()
            base = ".".join([*parent, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("timm_moe_dg.")}
    return (rooms & LEVELS.keys()) - {here[0].removesuffix(".py")}


def test_every_room_imports_only_from_rooms_below_it() -> None:
    seen = 0
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room in ABOVE_ALL:
            continue
        for other in imported_rooms(path):
            seen += 1
            assert LEVELS[other] < LEVELS[room], f"{path.relative_to(PACKAGE)} imports from {other}"
    assert seen > 20


def test_every_room_has_a_floor() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms | {"errors"} == LEVELS.keys()


def test_the_walk_finds_relative_and_absolute_imports() -> None:
    assert "layers" in imported_rooms(PACKAGE / "models" / "_moe_vit.py")
    assert "errors" in imported_rooms(PACKAGE / "losses" / "router.py")


@pytest.mark.slow
def test_importing_the_package_is_cheap() -> None:
    heavy = ("accelerate", "matplotlib", "sklearn", "scipy", "pandas", "onnx")
    # timm and torch import what they import; only what comes on top of them counts
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-c", f"import sys, {package}; print([name for name in {heavy} if name in sys.modules])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for package in ("timm_moe_dg", "timm")
    )
    assert ours == theirs


def test_no_tool_is_imported_by_the_package() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if "import tools" in path.read_text()]


def test_no_room_is_too_full_to_live_in() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    for folder in folders:
        files = list(folder.glob("*.py"))
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert len(files) <= 20, folder
        assert lines <= 2500, f"{folder.name} has {lines} lines"
