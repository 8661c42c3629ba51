"""Tools: the command `timm-moe-dg`, names in messages, help, mistyped options, modules of users, and endings."""

import ast
import importlib.metadata
import multiprocessing
import os
import resource
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
import torch

from tests.load_tool import TOOLS, load_tool, run_tool
from timm_moe_dg.__main__ import COMMANDS, main
from timm_moe_dg.cli import tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.errors import ArgumentError, CheckpointError, ImageReadError

ROOT = TOOLS.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = sorted(path.stem for path in TOOLS.glob("*.py"))


@pytest.fixture
def as_command(monkeypatch):
    monkeypatch.setattr(tool, "started_as", "")  # undoes what `main` sets
    monkeypatch.setattr(sys, "argv", [])


def test_every_tool_is_a_command_and_stands_in_the_list(capsys):
    assert sorted(file for file, _ in COMMANDS.values()) == [f"{name}.py" for name in NAMES]
    for words in ([], ["--help"]):
        main(words)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
        assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("word", "answer"), [("finetun", "did you mean finetune?"), ("x\ny", "choose one of finetune,")]
)
def test_an_unknown_command_is_one_line_with_the_nearest(word, answer):
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code.startswith(f"timm-moe-dg: {word!r} is not a command; {answer}")
    assert "\n" not in caught.value.code


def test_messages_name_the_tool_as_it_was_started(as_command, capsys, tmp_path):
    with pytest.raises(SystemExit, match=r"^report\.py: ArgumentError"):
        run_tool("report", tmp_path)
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
    with pytest.raises(SystemExit) as caught:
        main(["finetune"])
    assert caught.value.code == expected
    without("mistake")
    with pytest.raises(ModuleNotFoundError):
        main(["finetune"])


def test_modules_of_the_extra_are_those_that_pyproject_lists():
    packages = {name.partition(">")[0] for name in SETTINGS["optional-dependencies"]["train"]}
    distributions = importlib.metadata.packages_distributions()
    assert {distributions[module][0] for module in tool.TRAIN} == packages
    # What tools import at their start is a dependency, or among these
    nodes = [node for path in TOOLS.glob("*.py") for node in ast.parse(path.read_text()).body]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    core = {
        "PIL" if name == "pillow" else name for name in (text.partition(">")[0] for text in SETTINGS["dependencies"])
    }
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names <= {*core, *tool.TRAIN, "timm_moe_dg"}


def test_recipes_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(tool.recipe_file("gmoe_small")) == TOOLS / "recipes" / "gmoe_small.yaml"
    assert tool.recipe_file("nothing") == "nothing"
    Path("gmoe_small").write_text("model: resnet50")
    assert tool.recipe_file("gmoe_small") == "gmoe_small"  # the user's own file
    assert SETTINGS["scripts"] == {"timm-moe-dg": "timm_moe_dg.__main__:main"}


def printed(name, word, capsys):
    with pytest.raises(SystemExit) as caught:
        load_tool(name).build_parser().parse_args([word])
    assert not caught.value.code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_screen_of_80_columns_and_help_all_has_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = load_tool(name).build_parser()
    main, everything = (printed(name, word, capsys) for word in ("--help", "--help-all"))
    assert len(main) <= 60
    assert max(map(len, main + everything)) <= 80
    shown = "\n".join(everything).replace("--[no-]", "--")
    spellings = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    assert all(word.replace("--no-", "--") in shown for word in spellings - {"--help-all"})
    assert set(parser.main) <= {action.dest for action in parser._actions}
    assert ("--help-all" in "\n".join(main)) == (main != everything) == bool(parser.main)


def test_the_list_of_data_sets_has_the_defaults_of_each(capsys):
    lines = printed("finetune", "--list-datasets", capsys)
    cells = {line.split()[0]: line.split() for line in lines}
    assert cells["VLCS"] == ["VLCS", "yes", "4", "5001", "300", "32", "3e-05", "1e-06", "model's"]
    assert cells["rotated_digits"][1:] == ["no", "6", "501", "100", "16", "0.0003", "0", "32"]
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("name", "words", "answer"),
    [
        ("finetune", ["--batchsize", "8"], "no option --batchsize; did you mean --batch-size?"),
        ("finetune", ["--batchsize=8"], "no option --batchsize; did you mean --batch-size?"),
        ("sweep", ["-j", "2"], "no option -j"),
        ("finetune", ["output\n/RUN"], r"unexpected argument 'output\n/RUN'"),
        ("finetune", ["--xyzzy"], "no option --xyzzy"),
    ],
)
def test_a_mistyped_option_is_one_line_with_the_nearest(name, words, answer, capsys):
    parser = load_tool(name).build_parser()
    for parse in (parser.parse_args, lambda words: parse_arguments(parser, words)):
        with pytest.raises(SystemExit, match="2"):
            parse(words)
        assert capsys.readouterr().err == f"{name}.py: error: {answer} (see {name}.py --help)\n"


def test_modules_are_named_in_either_form_and_not_behind_the_separator():
    words = ["--import", "a", "--steps", "3", "--import=b", "--", "--import", "c"]
    assert tool.named_imports(words) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "code", "error", "message"),
    [
        ("", "", ArgumentError, "import=''"),
        (".mine", "", ArgumentError, r"import='\.mine'"),
        ("mine.there", "", ArgumentError, r"import='mine\.there'"),
        ("mine.py", "", ArgumentError, r"import='mine\.py'"),
        ("mine", "import no_such_module", ModuleNotFoundError, "no_such_module"),
        ("mine", "int('a')", ValueError, "invalid literal"),
        ("mine", "len(3)", TypeError, "int"),
        (
            "mine",
            "from timm_moe_dg.data import *\nregister_benchmark(Benchmark('PACS', None, '', ''))",
            ArgumentError,
            "name='PACS'",
        ),
    ],
)
def test_errors_of_an_imported_module_are_its_own(name, code, error, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(error, match=message):
        tool.import_modules([name])


WORKER = """Caught ImageReadError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 1, in loop
timm_moe_dg.errors.ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it
"""


HANDLES = f"workers: the limit of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} on open files is reached"


def raising(error):
    def main(argv):
        raise error

    return tool.tool(main)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ImageReadError(WORKER), "ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it"),
        (CheckpointError("two\nlines"), "CheckpointError: two lines"),
        (CheckpointError("\x1b[31m\u202e"), r"CheckpointError: \x1b[31m\u202e"),
        (CheckpointError("x" * 10 * tool.LONGEST), f"CheckpointError: {'x' * 3000}"),
        (torch.OutOfMemoryError("of CUDA"), "memory is full; give a smaller --batch-size (of CUDA)"),
        (RuntimeError("can't allocate memory"), "memory is full; give a smaller --batch-size (can't allocate memory)"),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), HANDLES),
        (RuntimeError("received 0 items of ancdata"), HANDLES),
        (OSError(24, "Too many open files"), HANDLES),
        (OSError(24, "Too many open files", "a.png"), HANDLES),
        (OSError(36, "File name too long", "a"), "[Errno 36] File name too long: 'a'; check the path, its permissions"),
    ],
    ids=["of a worker", "lines", "escapes", "long", "GPU", "CPU", "handles", "descriptors", "pipe", "image", "path"],
)
def test_a_mistake_is_one_line_of_bearable_length(error, message):
    with pytest.raises(SystemExit) as caught:
        raising(error)([])
    assert caught.value.code.startswith(f"test_tool.py: {message}")
    assert caught.value.code.isprintable()
    assert len(caught.value.code) < tool.LONGEST + 10


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        HTTPError("https://x.org", 404, "Not Found", {}, None),
        OSError(22, "bug"),
        RuntimeError("bug"),
    ],
    ids=repr,
)
def test_a_network_error_or_a_bug_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        raising(error)([])


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (KeyboardInterrupt(), 130),
        (SystemExit(130), 130),
        (SystemExit(143), 143),
        (SystemExit(1), None),
        (SystemExit("error"), None),
    ],
    ids=repr,
)
def test_a_program_that_was_interrupted_ends_without_cleanup_and_others_do_not(monkeypatch, end, status):
    events = []
    worker = SimpleNamespace(terminate=lambda: events.append("worker"))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(os, "_exit", events.append)
    with pytest.raises(SystemExit):
        raising(end)([])  # called by another program
    assert events == []
    with pytest.raises(SystemExit):
        raising(end)()
    assert events == ([] if status is None else ["worker", status])


def test_names_that_are_not_utf_8_are_printed(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        tool.tool(lambda argv: stream.write("caf\udce9\n"))([])
    assert (tmp_path / "out").read_text() == "caf\\udce9\n"
