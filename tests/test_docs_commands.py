"""Commands, links, extras and files of README and docs exist, and the README's Python runs.

bash expands variables and loops of the pages: each program is a shell function that prints its arguments.
"""

import argparse
import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import timm

import timm_moe_dg
from tests.hub_server import fill_cache
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.__main__ import COMMANDS
from timm_moe_dg.cli.arguments import checked

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
PROGRAMS = ("python", "accelerate", "pip", "npm", "bash", "git", "timm-moe-dg")
INLINE = re.compile(rf"`((?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}|tools/\w+\.py) [^`]+)`")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")  # to files of this repository


def inline_commands(text: str) -> list[list[str]]:
    lines = [re.sub(r"\s+", " ", line) for line in INLINE.findall(FENCED.sub("", text))]
    return [shlex.split(line) for line in lines]


def block_commands(text: str) -> list[list[str]]:
    """Commands of a page's blocks, as bash would start them one after the other."""
    functions = "".join(f'{name}() {{ printf "%s\\0" {name} "$@" >&3; printf "\\n\\0" >&3; }}\n' for name in PROGRAMS)
    script = functions + "\n".join(block for language, block in FENCED.findall(text) if language == "bash")
    command = ["bash", "-c", f"exec 3>&1 1>/dev/null 2>&1\n{script}\ntrue"]  # pages list files that are not here
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    return [part.split("\0")[:-1] for part in done.stdout.removesuffix("\n\0").split("\n\0") if part]


@cache
def commands(page: Path) -> list[list[str]]:
    """Commands of a page, or of the docstring of a tool, whose required options may be dots."""
    text = page.read_text()
    if page.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        lines = re.findall(r"^    (timm-moe-dg .*)", docstring.replace("\\\n", " "), re.MULTILINE)
        lines = [line.replace(" cuda", " cpu") for line in lines if "..." not in line]
        text = "```bash\n" + "\n".join(lines) + "\n```"
    return block_commands(text) + inline_commands(text)


def split_at_tool(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns the name of a tool's file and its arguments, for a command in one of the three forms that start tools."""
    for index, word in enumerate(words):
        if re.fullmatch(r"tools/\w+\.py", word):
            return Path(word).stem, words[index + 1 :]
        is_command = (index == 0 and word == "timm-moe-dg") or [*words[:index][-1:], word] == ["-m", "timm_moe_dg"]
        if is_command and words[index + 1 : index + 2] and words[index + 1] in COMMANDS:
            return Path(COMMANDS[words[index + 1]][0]).stem, words[index + 2 :]
    return None


def spellings(parser: argparse.ArgumentParser, command: str = "") -> set[str]:
    """Options of a tool, and of one of its commands."""
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = [parser, *(commands[command] for commands in choices if command in commands)]
    return {spelling for parser in parsers for spelling in parser._option_string_actions}


def mentioned(page: Path) -> list[tuple[str, list[str]] | None]:
    """Commands within sentences, which need not have all required options."""
    return [split_at_tool(words) for words in inline_commands(page.read_text())]


def check(parser, words):
    """Checks names and values of a command's options, without the files that it names."""
    args = vars(parser.parse_args(words))
    checked(parser.options, {name: value for name, value in args.items() if name in parser.options}, "a page")


@pytest.mark.parametrize("page", [*PAGES, *sorted(TOOLS.glob("*.py"))], ids=lambda page: page.name)
def test_every_command_of_a_tool_is_one_that_it_takes(page):
    for tool, arguments in filter(None, map(split_at_tool, commands(page))):
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        parser = load_tool(tool).build_parser()
        if (tool, arguments) in mentioned(page):
            options = {word for word in arguments if word.startswith("-")}
            assert options <= spellings(parser, *arguments[:1])
            continue
        if "--help" in arguments:
            continue
        command = load_tool(tool).EVERYTHING if tool == "visualize" and "/" in arguments[0] else None
        check(parser, [*([command] if command else []), *arguments[:cut]])
        check(load_tool("finetune").build_parser(), arguments[cut + 1 :])


def test_every_extra_that_a_page_installs_exists():
    extras = set(re.findall(r"^([\w-]+) = \[$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"timm_moe_dg\[([\w-]+)\]", page.read_text())}
    assert named
    assert named <= extras


def test_links_lead_to_files_that_exist():
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text())]
    assert len(links) > 30
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]


@pytest.mark.slow
def test_the_readme_s_python_runs(tmp_path):
    # The Hub's cache as after downloading the dense weights, with random ones
    dense = "deit_small_patch16_224.fb_in1k"
    fill_cache(tmp_path, f"timm/{dense}", timm.create_model(dense).state_dict())
    calls, snippet = (block for language, block in FENCED.findall(README.read_text()) if language == "python")
    (keywords,) = (node.keywords for node in ast.walk(ast.parse(calls)) if isinstance(node, ast.Call) and node.keywords)
    assert {word.arg for word in keywords} <= inspect.signature(timm_moe_dg.finetune).parameters.keys()
    checks = "\nassert loss > 0 and routed.shape == (4, 62)\nassert torch.allclose(routed[2], shared[2])"
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", snippet + checks]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr


@pytest.mark.slow
def test_the_readme_names_every_registered_model_and_gives_sizes():
    text = README.read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*?\| ([\d.]+) M, ", text, re.MULTILINE))
    assert len(rows) >= 7
    assert [name for name in timm_moe_dg.models.__all__ if timm.is_model(name) and f"`{name}`" not in text] == []
    for name, millions in rows.items():
        count = sum(parameter.numel() for parameter in timm.create_model(name, device="meta").parameters())
        assert f"{count / 1e6:.2f}" == millions


def test_the_page_of_command_lines_has_every_command():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert re.findall("^:prog: timm-moe-dg (.*)$", page, re.MULTILINE) == list(COMMANDS)
