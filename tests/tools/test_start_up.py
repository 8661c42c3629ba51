"""What needs no network starts without the libraries that take seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import collecting, sweeping

TOOLS = Path(__file__).parents[2] / "tools"
HEAVY = ("torch", "timm", "torchvision", "accelerate", "datasets", "matplotlib", "pandas", "scipy", "sklearn", "wandb")
PROGRAM = """
import json, runpy, sys
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
finally:
    print(json.dumps(sorted(set(sys.modules))), file=sys.stderr)
"""


def loaded(tool: str, *words: str) -> tuple[str, set[str]]:
    """What a tool prints, and the heavy ones of the modules that it has imported."""
    program = PROGRAM.replace("sys.argv[1]", repr(str(TOOLS / tool)))
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1])) & set(HEAVY)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["sweep.py", "collect_results.py"])
def test_help_takes_none(tool):
    text, heavy = loaded(tool, "--help")
    assert text.startswith("usage: ")
    assert heavy == set()


@pytest.mark.slow
@pytest.mark.parametrize("word", ["--dry-run", "--status"])
def test_a_plan_takes_none(tmp_path, word):
    count = sweeping.write_finished(tmp_path, 1)
    text, heavy = loaded("sweep.py", *sweeping.command(tmp_path, 1, word)[2:])
    assert text.count("-trial0-") >= count / 2
    assert heavy == set()


@pytest.mark.slow
def test_folders_and_regions_are_counted_without_any(tmp_path):
    images = tmp_path / "images"
    for name in ("art/dog", "art/cat", "photo/dog", "photo/cat"):
        (images / name).mkdir(parents=True)
        (images / name / "1.png").write_bytes(b"")
    plans = (("folder", "leave_one_domain_out", "2 runs in all"), ("geo_digits", "per_region", "5 runs in all"))
    for dataset, protocol, expected in plans:
        words = ["--datasets", dataset, "--data-dir", str(images), "--protocols", protocol, "--trial-seeds", "0"]
        text, heavy = loaded("sweep.py", *words, "--output", str(tmp_path / "output"), "--dry-run")
        assert expected in text
        assert heavy == set()


@pytest.mark.slow
def test_tables_take_none(tmp_path):
    collecting.write_runs(tmp_path, 40)
    text, heavy = loaded("collect_results.py", str(tmp_path), "--format", "markdown")
    assert "gmoe_small_patch16" in text
    assert heavy == set()
