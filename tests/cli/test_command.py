"""The command `timm-moe-dg`: its list, mistyped commands, missing extras and the names in messages."""

import ast
import importlib.metadata
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.__main__ import COMMANDS, main
from timm_moe_dg.cli import tool

ROOT = TOOLS.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def as_command(monkeypatch):
    monkeypatch.setattr(tool, "started_as", "")  # undoes what `main` sets
    monkeypatch.setattr(sys, "argv", [])


def test_every_tool_is_a_command_and_stands_in_the_list(capsys):
    assert sorted(file for file, _ in COMMANDS.values()) == sorted(path.name for path in TOOLS.glob("*.py"))
    for words in ([], ["--help"]):
        main(words)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("word", "answer"), [("finetun", "did you mean finetune?"), ("x\ny", "choose one of finetune, evaluate")]
)
def test_an_unknown_command_is_one_line_with_the_nearest(word, answer):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code.startswith(f"timm-moe-dg: {word!r} is not a command; {answer}")
    assert "\n" not in caught.value.code


def test_messages_name_the_tool_as_it_was_started(as_command, capsys, tmp_path):
    with pytest.raises(SystemExit, match=r"^report\.py: ArgumentError"):
        load_tool("report").main([str(tmp_path)])
    assert tool.command("report") == "python tools/report.py"
    assert tool.command("finetune", "accelerate launch") == "accelerate launch tools/finetune.py"
    with pytest.raises(SystemExit, match=r"^timm-moe-dg report: ArgumentError"):
        main(["report", str(tmp_path)])
    assert tool.command("report") == "timm-moe-dg report"
    assert tool.command("finetune", "accelerate launch") == "accelerate launch -m timm_moe_dg finetune"
    with pytest.raises(SystemExit, match="2"):
        main(["push"])
    assert capsys.readouterr().err.startswith("timm-moe-dg push: error: ")


def test_a_missing_extra_is_one_line_with_the_install_line(as_command, monkeypatch):
    def without(name):
        def run(path, run_name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(runpy, "run_path", run)

    without("accelerate.utils")
    expected = "timm-moe-dg finetune needs accelerate, which is not installed: pip install 'timm_moe_dg[train]'"
    with pytest.raises(SystemExit, match=f"^{expected.replace('[', '.').replace(']', '.')}$"):
        main(["finetune"])
    without("mistake")
    with pytest.raises(ModuleNotFoundError):
        main(["finetune"])


def test_modules_of_extras_are_those_that_pyproject_lists():
    packages = {name.partition(">")[0] for name in SETTINGS["optional-dependencies"]["train"]}
    distributions = importlib.metadata.packages_distributions()
    assert {distributions[module][0] for module in tool.TRAIN} == packages
    # What tools import at their start is a dependency, or among these
    names = {alias.name for path in TOOLS.glob("*.py") for alias in imports(path)} - sys.stdlib_module_names
    core = {"PIL" if name == "pillow" else name for name in map(requirement, SETTINGS["dependencies"])}
    assert names <= {*core, *tool.TRAIN, "timm_moe_dg"}


def imports(path: Path) -> list[ast.alias]:
    nodes = ast.parse(path.read_text()).body
    froms = [ast.alias((node.module or "").partition(".")[0]) for node in nodes if isinstance(node, ast.ImportFrom)]
    return froms + [
        ast.alias(alias.name.partition(".")[0]) for n in nodes if isinstance(n, ast.Import) for alias in n.names
    ]


def requirement(text: str) -> str:
    return text.partition(">")[0]


def test_recipes_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(tool.recipe_file("gmoe_small")) == TOOLS / "recipes" / "gmoe_small.yaml"
    assert tool.recipe_file("nothing") == "nothing"
    Path("gmoe_small").write_text("model: resnet50")
    assert tool.recipe_file("gmoe_small") == "gmoe_small"  # the user's own file
    (entry,) = SETTINGS["scripts"].items()
    assert entry == ("timm-moe-dg", "timm_moe_dg.__main__:main")
