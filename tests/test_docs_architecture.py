"""docs/architecture.md describes the package as it is."""

import re
from pathlib import Path

from tests.draw_architecture import PICTURE, draw, package_imports
from tests.test_imports import LEVELS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_has_the_imports_of_today():
    imports = package_imports()
    assert PICTURE.read_text() == draw(imports), "run python -m tests.draw_architecture"
    assert f"({PICTURE.name})" in PAGE
    assert "layers" not in imports["metrics"]
    assert draw({**imports, "metrics": {*imports["metrics"], "layers"}}) != draw(imports)


def test_every_package_has_a_row():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == sorted(LEVELS, key=lambda package: LEVELS[package])


def test_every_named_file_exists():
    names = re.findall(r"`([\w/]+/[\w/]*(?:\.\w+)?)`", PAGE)
    files = [name for name in names if name.startswith(("timm_moe_dg/", "tools/", "tests/"))]
    assert len(files) > 10
    assert not [name for name in files if not (ROOT / name).exists()]
