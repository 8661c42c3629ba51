"""The tools' parser: the length of the help, mistyped options, and files of the other kind."""

import pytest

from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.errors import ArgumentError

RECIPES = TOOLS / "recipes"
NAMES = sorted(path.stem for path in TOOLS.glob("*.py"))


def printed(name, word, capsys, *words):
    with pytest.raises(SystemExit) as caught:
        load_tool(name).build_parser().parse_args([*words, word])
    assert not caught.value.code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_screen_of_80_columns_and_help_all_has_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = load_tool(name).build_parser()
    main, everything = (printed(name, word, capsys) for word in ("--help", "--help-all"))
    assert len(main) <= 56
    assert max(map(len, main + everything)) <= 80
    shown = "\n".join(everything).replace("--[no-]", "--")
    spellings = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    assert all(word.replace("--no-", "--") in shown for word in spellings - {"--help-all"})
    assert set(parser.main) <= {action.dest for action in parser._actions}
    assert ("--help-all" in "\n".join(main)) == (main != everything) == bool(parser.main)


def test_an_action_is_written_once_with_its_values(capsys):
    text = "\n".join(printed("finetune", "--help-all", capsys))
    assert "  -b, --batch-size N  " in text
    assert "  --[no-]pretrained  " in text
    assert "  --test-domains, --test-envs DOMAIN ...\n" in text


@pytest.mark.parametrize(
    ("tool", "words", "answer"),
    [
        ("finetune", ["--batchsize", "8"], "no option --batchsize; did you mean --batch-size?"),
        ("finetune", ["--batchsize=8"], "no option --batchsize; did you mean --batch-size?"),
        ("benchmark", ["models", "--rouns", "8"], "no option --rouns; did you mean --rounds?"),
        ("sweep", ["-j", "2"], "no option -j"),
        ("finetune", ["output\n/RUN"], r"unexpected argument 'output\n/RUN'"),
        ("finetune", ["--xyzzy"], "no option --xyzzy"),
    ],
)
def test_a_mistyped_option_is_one_line_with_the_nearest(tool, words, answer, capsys):
    parser = load_tool(tool).build_parser()
    for parse in (parser.parse_args, lambda words: parse_arguments(parser, words)):
        with pytest.raises(SystemExit, match="2"):
            parse(words)
        assert capsys.readouterr().err == f"{tool}.py: error: {answer} (see {tool}.py --help)\n"


@pytest.mark.parametrize(
    ("tool", "words", "remedy"),
    [
        ("sweep", ["-c", "gmoe_small"], r"'model' is not an option of sweep\.py; .*: give it as --recipe"),
        ("finetune", ["-c", "digits"], r"'\w+' is not an option of finetune\.py; .*: give it to sweep as --config"),
        ("finetune", ["-c", "gmoe_smal"], "cannot be read as YAML .*; did you mean gmoe_small"),
    ],
)
def test_a_file_of_the_other_kind_names_the_option_to_use(tool, words, remedy):
    with pytest.raises(ArgumentError, match=remedy):
        parse_arguments(load_tool(tool).build_parser(), words)


def test_a_plan_given_as_a_recipe_names_the_option_to_use():
    tool = load_tool("sweep")
    with pytest.raises(ArgumentError, match="recipe='digits': is a plan; give it as --config"):
        tool.read_sweep(tool.build_parser().parse_args(["--recipe", "digits"]))


def test_the_list_of_data_sets_has_the_defaults_of_each(capsys):
    lines = printed("finetune", "--list-datasets", capsys)
    cells = {line.split()[0]: line.split() for line in lines}
    assert cells["VLCS"] == ["VLCS", "yes", "4", "5001", "300", "32", "3e-05", "1e-06", "model's"]
    assert cells["rotated_digits"][1:] == ["no", "6", "501", "100", "16", "0.0003", "0", "32"]
    assert max(map(len, lines)) <= 100
