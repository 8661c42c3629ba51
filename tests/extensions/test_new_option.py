"""A new option is one line in protocols/options.py, and earlier runs resume as if it had its default."""

import os
import shutil
import signal
import subprocess
from functools import partial

import pytest

import timm_moe_dg
from tests.load_tool import TOOLS, run_tool
from tests.saved_run import outcome
from tests.tools.test_finetune_resume import during_step

pytestmark = pytest.mark.slow  # runs in processes of their own

PACKAGE = TOOLS.parent / "timm_moe_dg"
NEXT_OPTION = "    cpu_threads: int | None = option("
TOY = '    toy_decay: float = option(0.0, type=non_negative, help="a toy (default: %(default)s)")\n'
SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "patch_size=8"]
RUN = ["--model", "deit_tiny_patch16_224", *SIZE, "--steps", "4", "--eval-freq", "3", "-b", "2", "--workers", "0"]
RUN += ["--save-rules", "oracle"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package with one more option."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(PACKAGE, root / "timm_moe_dg", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TOOLS, root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    options = root / "timm_moe_dg" / "protocols" / "options.py"
    text = options.read_text()
    assert text.count(NEXT_OPTION) == 1
    options.write_text(text.replace(NEXT_OPTION, TOY + NEXT_OPTION))
    return root


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """Two runs without the option: a finished one and a stopped one."""
    output = tmp_path_factory.mktemp("earlier")
    words = [*RUN, "--cpu-threads", 1, "--output", output, "--experiment"]
    run_tool("finetune", *words, "whole")
    with during_step(1, partial(os.kill, os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
        run_tool("finetune", *words, "stopped")
    return output


def finetune(python, root, *words):
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [python, str(root / "tools" / "finetune.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


def test_the_tool_has_the_option_and_an_earlier_run_resumes_with_its_default(fresh_python, extended, earlier):
    assert not hasattr(timm_moe_dg.protocols.options.RunOptions(), "toy_decay")
    refused = finetune(fresh_python, extended, "--resume", earlier / "stopped", "--toy-decay", "0.5")
    assert refused.returncode == 1
    assert "ArgumentError: toy_decay=0.5: the run to resume was started with 0.0; use that, or" in refused.stderr
    resumed = finetune(fresh_python, extended, "--resume", earlier / "stopped")
    assert resumed.returncode == 0, resumed.stderr
    assert "after step 1" in resumed.stdout
    assert outcome(earlier / "stopped") == outcome(earlier / "whole")
