"""What the pages show runs: the README's Python as it stands, all commands against the tools' own command lines."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import timm

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.hub_cache import fill_cache
from tests.load_tool import load_tool

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")  # to files of this repository
DENSE = "deit_small_patch16_224.fb_in1k"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def tool_commands(page: Path) -> list[list[str]]:
    """Every call of a tool on a page: the script, then its arguments; a shell's variables are nobody's to parse."""
    lines = "\n".join(BASH.findall(page.read_text())).replace("\\\n", " ").splitlines()
    words = [shlex.split(part, comments=True) for line in lines if "$" not in line for part in line.split("&&")]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_tool_command_parses(page):
    for script, *arguments in tool_commands(page):
        own, _, passed = " ".join(map(shlex.quote, arguments)).partition(" -- ")
        load_tool(Path(script).stem).build_parser().parse_args(shlex.split(own))
        load_tool("finetune").build_parser().parse_args(shlex.split(passed))


def test_the_pages_show_most_tools():
    shown = {command[0] for page in PAGES for command in tool_commands(page)}
    assert len(shown) > 9
    assert "tools/finetune.py" in shown


def test_links_lead_to_pages_that_are_there():
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text())]
    assert len(links) > 30
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


@pytest.mark.slow
def test_the_table_lists_every_registered_model_with_its_size():
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| ([\d.]+) M, ", README, re.MULTILINE))
    ours = {name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("timm_moe_dg.")}
    assert rows.keys() == ours - {"gmoe", "moge"}  # whose size is that of their backbone
    for name, millions in rows.items():
        count = sum(parameter.numel() for parameter in timm.create_model(name, device="meta").parameters())
        assert f"{count / 1e6:.2f}" == millions


def test_ci_runs_the_readme_commands():
    script = (ROOT / ".ci" / "run").read_text()
    for start in re.findall(r"readme_command '(.*?)'", script):
        assert [line for line in README.splitlines() if line.startswith(start)], start
