"""The wheel alone brings the command, the recipes and the card templates; run in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIGITS = ["--dataset", "rotated_digits", "--model", "gmoe_tiny_patch16", "--img-size", "32", "--no-check-images"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory, fresh_python):
    """Returns a function that runs a command with the installed wheel, and no clone, on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    # The other packages are those of this environment
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    (folder / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(*words: str, status: int = 0) -> str:
        if words[0] == "timm-moe-dg":
            words = (str(folder / "site" / "bin" / words[0]), *words[1:])
        where = {"cwd": folder / "empty", "env": environment}
        done = subprocess.run([fresh_python, *words], capture_output=True, text=True, **where)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_dry_run_of_a_fine_tuning_by_one_process_and_by_the_launcher(run):
    for program in (
        ["timm-moe-dg"],
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "timm_moe_dg"],
    ):
        assert "the run can start" in run(*program, "finetune", *DIGITS, "--dry-run")


def test_a_sweep_of_a_recipe_runs_the_packaged_finetune(run):
    printed = run("timm-moe-dg", "sweep", "--recipe", "gmoe_small", "--datasets", "rotated_digits", "--dry-run")
    commands = [line for line in printed.splitlines() if not line.startswith("#")]
    assert len(commands) == 18
    assert all("/site/timm_moe_dg/tools/finetune.py " in line and " --pretrained " in line for line in commands)


def test_a_card_is_written_from_the_packaged_templates(run, tmp_path):
    make = "import timm, timm_moe_dg; from timm_moe_dg.hub.folder import fill_from_network; from pathlib import Path\n"
    make += (
        f"fill_from_network(Path({str(tmp_path / 'saved')!r}), timm.create_model('gmoe_tiny_patch16', num_classes=2))"
    )
    run("-c", make)
    words = ["--model", str(tmp_path / "saved"), "--repo-id", "a/b", "--output", str(tmp_path), "--dry-run"]
    assert "README.md" in run("timm-moe-dg", "push", *words)
    assert "timm" in (tmp_path / "hub" / "a--b" / "README.md").read_text()
