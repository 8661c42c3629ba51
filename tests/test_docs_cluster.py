"""What docs/guides/slurm.md shows is run by a script or parsed by the tool, and its figures are those of the code."""

import re
import signal
from pathlib import Path

import pytest

from tests.checks import PAGE, page_lines, shown_command
from timm_moe_dg.finetuning import launch
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.sweeping import jobs

ROOT = Path(__file__).parent.parent
SCRIPTS = "".join(
    path.read_text() for path in (ROOT / "tests").glob("*/*.py") if path.parent.name in ("slurm", "machines")
)
TAKEN = re.findall(r'shown_command\(\s*"([^"]+)"', SCRIPTS)


def test_every_command_is_taken_by_a_script_or_is_a_tool_s():
    lines = page_lines(PAGE.read_text())
    assert len(lines) > 7
    assert len(TAKEN) == 5
    others = [line for line in lines if not re.search(r"^timm-moe-dg | -m timm_moe_dg | tools/", line)]
    others = [line for line in others if not line.startswith(tuple(TAKEN))]
    assert others == ['pip install "timm_moe_dg[train,slurm]"']


@pytest.mark.parametrize("start", TAKEN)
def test_a_command_that_a_script_takes_is_there_once(start):
    assert shown_command(start)[0] in ("scontrol", "scancel", "accelerate")


def test_placeholders_are_replaced():
    assert shown_command("scancel", JOB="7_1") == ["scancel", "7_1"]
    with pytest.raises(ValueError, match="unpack"):
        shown_command("srun")


def test_figures_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    assert f"`--process-timeout` ({RunOptions().process_timeout:g} minutes" in text
    assert signal.SIGUSR2 in jobs.NOTICES
    assert {"DEEPSPEED", "MEGATRON_LM"} <= set(launch._PLUGINS)
