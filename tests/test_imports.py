"""Imports run one way, from level to level; packages of one level do not import each other."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "timm_moe_dg"
# In the order of docs/architecture.md
LEVELS = {
    "errors": 0,
    **dict.fromkeys(("cli", "layers", "data", "metrics"), 1),
    "losses": 2,  # that layers report
    **dict.fromkeys(("models", "algorithms", "networks"), 3),
    "protocols": 4,  # the options list the algorithms, and the parts that can be frozen
    **dict.fromkeys(("storage", "results"), 5),
    **dict.fromkeys(("hub", "analysis"), 6),
    "finetuning": 7,  # draws the learning curves of a run
    "comparisons": 8,
    "inference": 9,  # shows the state of a sweep
    "api": 10,
}


def imported_packages(path: Path) -> set[str]:
    """Returns the packages of timm_moe_dg that a file imports from, without its own."""
    parts = path.relative_to(PACKAGE).parts
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ("timm_moe_dg", *parts[: len(parts) - node.level]) if node.level else ()
            base = ".".join([*parent, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        packages |= {name.split(".")[1] for name in names if name.startswith("timm_moe_dg.")}
    return (packages & LEVELS.keys()) - {parts[0].removesuffix(".py")}


def test_every_package_imports_from_lower_levels_only() -> None:
    imports = 0
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        for other in imported_packages(path):
            imports += 1
            assert LEVELS[other] < LEVELS[package], f"{path.relative_to(PACKAGE)} imports from {other}"
    assert imports > 20
    assert "layers" in imported_packages(PACKAGE / "models" / "gmoe.py")
    assert "errors" in imported_packages(PACKAGE / "losses.py")


def test_every_package_has_a_level() -> None:
    packages = {path.stem for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages | {"errors", "losses", "metrics", "api"} == LEVELS.keys()


def test_folders_have_at_most_20_files_and_2500_lines() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        files = list(folder.glob("*.py"))
        lines = sum(len(path.read_text().splitlines()) for path in files)
        assert len(files) <= 20, folder
        assert lines <= 2500, f"{folder.name} has {lines} lines"
