"""The models are registered whenever both this package and timm are imported, in either order and by any way in."""

import subprocess
import sys

import pytest

TOY = """
import sys
sys.path.insert(0, {folder!r})
from timm_moe_dg import registration
registration._MODELS = "toy_models"
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def toy(tmp_path):
    """Begins a program in which another package is called timm, and another module registers the models."""
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "__init__.py").write_text("import os\nif 'FAIL' in os.environ: raise ImportError('no torch')")
    (tmp_path / "timm" / "models.py").write_text("")
    (tmp_path / "toy_models.py").write_text(
        "import timm\nprint('registered after', timm.__name__, timm.__spec__.has_location)"
    )
    return TOY.format(folder=str(tmp_path))


@pytest.mark.parametrize(
    "how", ["import timm", "import timm.models", "from timm import models", "import timm, timm.models"]
)
def test_they_follow_timm_once(toy, how):
    assert run(f"{toy}print('before'); {how}; print('end')").split("\n")[:3] == [
        "before",
        "registered after timm True",
        "end",
    ]


def test_a_failed_import_of_timm_is_followed_by_a_later_one(toy):
    program = "import os; os.environ['FAIL'] = '1'\ntry: import timm\nexcept ImportError: print('failed')\n"
    program += "del os.environ['FAIL']; import timm; import importlib; importlib.reload(timm)\n"
    program += "print(type(timm.__loader__).__name__, type(timm.__spec__.loader).__name__)"
    found = run(toy + program).split("\n")
    assert found[:3] == ["failed", "registered after timm True", "SourceFileLoader SourceFileLoader"]


def test_another_call_adds_no_second_watch(toy):
    program = (
        "registration.register_with_timm(); import timm\nprint(sum('Watch' in repr(one) for one in sys.meta_path))"
    )
    assert run(toy + program).split() == ["registered", "after", "timm", "True", "0"]


WAYS_IN = [
    "timm_moe_dg.layers.router",  # imports timm itself, and the models import from there
    "timm_moe_dg.models._moe_vit",
    "timm_moe_dg.losses.moge",
    "timm, timm_moe_dg",
]


@pytest.mark.slow
@pytest.mark.parametrize("first", WAYS_IN)
def test_every_way_in_registers_them(first):
    program = f"import {first}, timm_moe_dg, timm, warnings\nwarnings.simplefilter('error')\n"
    program += "print(set(timm_moe_dg.models.__all__) <= set(timm.list_models()), timm_moe_dg.upcycle.__module__)"
    assert run(program).split() == ["True", "timm_moe_dg.models.upcycling"]
