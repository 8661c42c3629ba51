"""The figures of docs/guides/slurm.md are those of the code."""

import signal
from pathlib import Path

from timm_moe_dg.finetuning import jobs, processes
from timm_moe_dg.protocols.options import RunOptions


def test_figures_are_those_of_the_code():
    page = Path(__file__).parent.parent / "docs" / "guides" / "slurm.md"
    text = " ".join(page.read_text().split())
    assert f"`--process-timeout` ({RunOptions().process_timeout:g} minutes" in text
    assert signal.SIGUSR2 in jobs.NOTICES
    assert {"DEEPSPEED", "MEGATRON_LM"} <= set(processes._PLUGINS)
