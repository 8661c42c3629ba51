"""What the README shows runs: its Python as it stands, its commands against the tools' own command lines."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import timm_moe_dg
from tests.hub_cache import fill_cache
from tests.load_tool import load_tool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DENSE = "deit_small_patch16_224.fb_in1k"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def tool_commands() -> list[list[str]]:
    """Every call of a tool in the README: the script, then its arguments."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    scripts = [[index for index, word in enumerate(line) if word.startswith("tools/")] for line in words]
    return [line[at[0] :] for line, at in zip(words, scripts, strict=True) if at]


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory):
    """The Hub's cache as it would be after downloading the snippet's dense source, with random weights."""
    cache = tmp_path_factory.mktemp("hub")
    fill_cache(cache, f"timm/{DENSE}", timm.create_model(DENSE).state_dict())
    return cache


@pytest.mark.slow
def test_the_python_snippet_runs_and_reports_both_mixture_layers(hub_cache):
    (snippet,) = blocks("python")
    environment = {**os.environ, "HF_HUB_CACHE": str(hub_cache), "HF_HUB_OFFLINE": "1"}
    checks = "\nassert logits.shape == (4, 7) and routed.shape == (4, 62)\nassert torch.allclose(routed[2], shared[2])"
    process = subprocess.run(
        [sys.executable, "-c", snippet + checks], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    assert [line.split()[0] for line in process.stdout.splitlines()] == ["blocks.8.mlp", "blocks.10.mlp"]


def test_every_tool_command_parses():
    commands = tool_commands()
    assert {command[0] for command in commands} >= {"tools/finetune.py", "tools/benchmark.py"}
    for script, *arguments in commands:
        load_tool(Path(script).stem).build_parser().parse_args(arguments)


def test_the_table_lists_every_registered_model_with_its_size():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| ([\d.]+) M \|", README, re.MULTILINE))
    assert sorted(rows) == sorted(timm_moe_dg.models.__all__)
    for name, millions in rows.items():
        count = sum(parameter.numel() for parameter in timm.create_model(name, device="meta").parameters())
        assert f"{count / 1e6:.2f}" == millions


def test_ci_runs_the_readme_commands():
    script = (ROOT / ".ci" / "run").read_text()
    for start in re.findall(r"readme_command '(.*?)'", script):
        assert [line for line in README.splitlines() if line.startswith(start)], start
