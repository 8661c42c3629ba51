"""The commands that the tools' docstrings show: bash reads them, and so does the tool's own command line."""

import ast
import re
import shlex
import subprocess

import pytest

from tests.load_tool import TOOLS, load_tool

STARTS = re.compile(r"^    (?=(?:\w+=\S+ )*(?:accelerate launch|python) )")


def commands() -> list[str]:
    """Every indented command line of a tool's docstring; dots stand for options that are left out."""
    found = []
    for path in sorted(TOOLS.glob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text()), clean=False) or "").replace("\\\n", " ").splitlines()
        found += [re.sub(r" +", " ", line.strip()) for line in lines if STARTS.match(line)]
    return found


COMMANDS = commands()


def test_there_are_commands_of_most_tools():
    assert len(COMMANDS) > 15
    assert len({script for line in COMMANDS for script in re.findall(r"tools/\w+\.py", line)}) > 7


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_bash_and_parses(line):
    read = subprocess.run(["bash", "-n"], input=line, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    here = line.replace(" cuda", " cpu")  # a device that there is everywhere
    words = shlex.split(here, comments=True)
    (at,) = [index for index, word in enumerate(words) if word.startswith("tools/")][:1]
    own, _, passed = " ".join(map(shlex.quote, words[at + 1 :])).partition(" -- ")
    if "..." in words:
        return  # stands for what is required as well
    load_tool(words[at].removeprefix("tools/").removesuffix(".py")).build_parser().parse_args(shlex.split(own))
    load_tool("finetune").build_parser().parse_args(shlex.split(passed))
