"""Commands in the tools' docstrings are valid bash, and the tools' own parsers accept them."""

import ast
import re
import shlex
import subprocess

import pytest

from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.__main__ import COMMANDS as BY_NAME

STARTS = re.compile(r"^    (?=timm-moe-dg )")


def commands() -> list[str]:
    """Returns the indented command lines of the tools' docstrings."""
    lines: list[str] = []
    for path in sorted(TOOLS.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        assert max(map(len, docstring.splitlines())) < 80, path.name  # columns of a small terminal
        lines += [line for line in docstring.replace("\\\n", " ").splitlines() if STARTS.match(line)]
    return [re.sub(r" +", " ", line.strip()) for line in lines]


COMMANDS = commands()


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_bash_and_parses(line):
    checked = subprocess.run(["bash", "-n"], input=line, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if "..." in line:  # which stands for required options
        return
    words = shlex.split(line.replace(" cuda", " cpu"), comments=True)
    tool, options = BY_NAME[words[1]][0].removesuffix(".py"), words[2:]
    if tool == "visualize" and "/" in options[0]:
        options.insert(0, load_tool(tool).EVERYTHING)
    if "--" in options:  # of sweep.py
        load_tool("finetune").build_parser().parse_args(options[options.index("--") + 1 :])
        options = options[: options.index("--")]
    load_tool(tool).build_parser().parse_args(options)
