"""A new option is one line in protocols/options.py, and runs from before it resume as if it had its default."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

import timm_moe_dg
from tests.load_tool import TOOLS, load_tool
from tests.tools.test_finetune_resume import during_step, outcome

pytestmark = pytest.mark.slow  # whole runs, programs and processes

PACKAGE = TOOLS.parent / "timm_moe_dg"
DOOR = "    cpu_threads: int | None = option("
TOY = '    toy_decay: float = option(0.0, type=non_negative, help="a toy (default: %(default)s)")\n'
SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "patch_size=8"]
RUN = ["--model", "deit_tiny_patch16_224", *SIZE, "--steps", "4", "--eval-freq", "3", "-b", "2", "--workers", "0"]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A copy of the package in which somebody has declared one more option."""
    root = tmp_path_factory.mktemp("walked")
    shutil.copytree(PACKAGE, root / "timm_moe_dg", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TOOLS, root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    options = root / "timm_moe_dg" / "protocols" / "options.py"
    text = options.read_text()
    assert text.count(DOOR) == 1
    options.write_text(text.replace(DOOR, TOY + DOOR))
    return root


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """Two runs of today's package, which does not know the option: one left alone, one stopped."""
    output = tmp_path_factory.mktemp("older")
    words = [*RUN, "--cpu-threads", "1", "--output", str(output), "--experiment"]
    load_tool("finetune").main([*words, "whole"])
    tool = load_tool("finetune")
    during_step(tool, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        tool.main([*words, "stopped"])
    return output


def finetune(root, *words):
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tools" / "finetune.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_the_tool_knows_the_option_and_an_older_run_does_not_miss_it(walked, older):
    assert not hasattr(timm_moe_dg.protocols.options.RunOptions(), "toy_decay")
    refused = finetune(walked, "--resume", older / "stopped", "--toy-decay", "0.5")
    assert refused.returncode == 1
    assert "ArgumentError: toy_decay=0.5: the run to resume was started with 0.0; use that, or" in refused.stderr
    resumed = finetune(walked, "--resume", older / "stopped")
    assert resumed.returncode == 0, resumed.stderr
    assert "after step 1" in resumed.stdout
    assert outcome(older / "stopped") == outcome(older / "whole")
