"""Importing any module of the package registers the models, and an error inside them is raised at every import."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "timm_moe_dg"
FIRST_IMPORTS = [f"timm_moe_dg{name}" for name in (".layers.router", ".models.gmoe", ".layers.reports", "")]

pytestmark = pytest.mark.slow


@pytest.fixture
def run(fresh_python):
    """Runs a program; with `path`, the package is imported from there."""

    def run(program: str, path: Path | None = None, python: str = fresh_python) -> subprocess.CompletedProcess[str]:
        start = f"import sys; sys.path.insert(0, {str(path or PACKAGE.parent)!r}); "
        return subprocess.run([python, "-c", start + program], capture_output=True, text=True)

    return run


@pytest.mark.parametrize("first", FIRST_IMPORTS)
def test_every_first_import_registers_the_models(run, first):
    program = f"import {first}, timm_moe_dg, timm\n"
    program += "print(timm.is_model('gmoe'), timm.is_model('moge_tiny'), timm_moe_dg.upcycle.__module__)"
    python = {"python": sys.executable} if first == FIRST_IMPORTS[0] else {}  # once without timm before
    assert run(program, **python).stdout.split() == ["True", "True", "timm_moe_dg.models.upcycling"]


def test_the_package_can_be_imported_from_a_zip_file(run, tmp_path):
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*"):
            if path.suffix != ".pyc":
                archive.write(path, path.relative_to(PACKAGE.parent))
    process = run("import timm_moe_dg; print(timm_moe_dg.__file__)", tmp_path / "package.zip")
    assert "package.zip" in process.stdout, process.stderr


def test_an_import_error_inside_the_models_is_raised_at_every_import(run, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "timm_moe_dg", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "timm_moe_dg" / "models" / "gmoe.py").open("a") as file:
        file.write("raise ImportError('broken')\n")
    program = "for _ in range(2):\n    try: import timm_moe_dg\n    except ImportError as error: print(error)"
    assert run(f"import timm\n{program}", tmp_path).stdout.split() == ["broken", "broken"]


def test_importing_loads_nothing_that_timm_does_not_and_overwrites_no_model(run):
    strict = "import sys, warnings, timm; warnings.filterwarnings('error', 'Overwriting', UserWarning)\n"
    process = run(f"{strict}print(*sys.modules); import timm_moe_dg; print(*sys.modules); timm_moe_dg.data.BENCHMARKS")
    before, after = (set(line.split()) for line in process.stdout.splitlines())
    assert process.returncode == 0
    assert "timm_moe_dg.models.gmoe" in after
    counting = {"torch.utils.flop_counter", "torch.utils.module_tracker"}  # of layers/grouped_linear.py, light modules
    assert {name.partition(".")[0] for name in after - before - counting} == {"timm_moe_dg"}
    assert not {"timm_moe_dg.data", "timm_moe_dg.algorithms", "timm_moe_dg.protocols"} & after  # needed by runs alone
