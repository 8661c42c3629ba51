"""docs/architecture.md describes the package as it is."""

import re
from pathlib import Path

from tests.test_imports import LEVELS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_every_package_has_a_row():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == sorted(LEVELS, key=lambda package: LEVELS[package])


def test_every_named_file_exists():
    names = re.findall(r"`([\w/]+/[\w/]*(?:\.\w+)?)`", PAGE)
    files = [name for name in names if name.startswith(("timm_moe_dg/", "tools/", "tests/"))]
    assert len(files) > 5
    assert not [name for name in files if not (ROOT / name).exists()]
