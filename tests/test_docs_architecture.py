"""docs/architecture.md is about the package as it is."""

import re
from pathlib import Path

from tests.draw_architecture import PICTURE, draw, room_imports
from tests.test_imports import LEVELS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_picture_shows_todays_imports():
    assert PICTURE.read_text() == draw(room_imports()), "run python -m tests.draw_architecture"


def test_the_picture_is_on_the_page():
    assert f"({PICTURE.name})" in PAGE


def test_an_import_more_changes_the_picture():
    imports = room_imports()
    assert "layers" not in imports["metrics"]
    assert draw({**imports, "metrics": {*imports["metrics"], "layers"}}) != draw(imports)


def test_every_room_has_its_line():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == sorted(LEVELS, key=lambda room: LEVELS[room])


def test_every_file_that_is_named_exists():
    named = re.findall(r"`([\w/]+/[\w/]*(?:\.\w+)?)`", PAGE)
    files = [name for name in named if name.startswith(("timm_moe_dg/", "tools/", "tests/"))]
    assert len(files) > 10
    assert not [name for name in files if not (ROOT / name).exists()]


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 120
