"""Importing any module of the package registers the models; an error inside of them is never swallowed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "timm_moe_dg"
WAYS_IN = ["timm_moe_dg.layers.router", "timm_moe_dg.models._moe_vit", "timm_moe_dg.losses.moge", "timm, timm_moe_dg"]


def run(program: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program; with `path`, the package is imported from there."""
    start = f"import sys; sys.path.insert(0, {str(path)!r}); " if path else ""
    return subprocess.run([sys.executable, "-c", start + program], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", WAYS_IN)
def test_every_way_in_registers_them(first):
    program = f"import {first}, timm_moe_dg, timm\n"
    program += "print(timm.is_model('gmoe'), timm.is_model('moge_tiny'), timm_moe_dg.upcycle.__module__)"
    assert run(program).stdout.split() == ["True", "True", "timm_moe_dg.models.upcycling"]


@pytest.mark.slow
def test_the_package_can_be_imported_from_a_zip_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*"):
            if path.suffix != ".pyc":
                archive.write(path, path.relative_to(PACKAGE.parent))
    done = run("import timm_moe_dg; print(timm_moe_dg.__file__)", tmp_path / "package.zip")
    assert "package.zip" in done.stdout, done.stderr


@pytest.mark.slow
def test_an_import_error_inside_the_models_shows_at_every_import(tmp_path):
    for path in PACKAGE.rglob("*.py"):
        target = tmp_path / path.relative_to(PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text() + ("raise ImportError('broken')\n" if path.name == "gmoe.py" else ""))
    program = "for _ in range(2):\n    try: import timm_moe_dg\n    except ImportError as error: print(error)"
    assert run(f"import timm\n{program}", tmp_path).stdout.split() == ["broken", "broken"]
