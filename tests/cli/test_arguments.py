"""Options: spellings, declarations, configuration files and the values that each type accepts."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.load_tool import load_tool
from timm_moe_dg.cli.arguments import add_options, available_cpus, declared, from_parsed, option, parse_arguments
from timm_moe_dg.cli.tool import ToolParser
from timm_moe_dg.cli.values import (
    fraction,
    fraction_to_1,
    int_from_2,
    json_object,
    key_value,
    model_source,
    non_negative,
    non_negative_int,
    output_file,
    position_or_name,
    positive_int,
    run_folder,
    seed_number,
    usable_device,
)
from timm_moe_dg.errors import ArgumentError


@pytest.fixture
def parser():
    parser = ToolParser(prog="tool.py")
    parser.add_argument("-c", "--config")
    parser.add_argument("-b", "--batch-size", type=positive_int, default=32)
    parser.add_argument("--test-domains", "--test-envs", type=position_or_name, nargs="+", default=[0])
    parser.add_argument("--pretrained", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--hparams", type=json_object, default={})
    parser.add_argument("--model-kwargs", type=key_value, nargs="*", default=[])
    parser.add_argument("--data-dir")
    parser.add_argument("--amp-dtype", choices=["bfloat16", "float16"])
    return parser


def write(path, **table):
    path.write_text(yaml.safe_dump(table))
    return str(path)


@pytest.mark.parametrize("words", [["--batch-size", "8"], ["--batch_size", "8"], ["--batch_size=8"], ["-b", "8"]])
def test_either_spelling(parser, words):
    assert parse_arguments(parser, words).batch_size == 8


def test_underscores_in_values_stay(parser):
    args = parse_arguments(parser, ["--data_dir=my_data/a_b", "--test_envs", "1", "2"])
    assert args.data_dir == "my_data/a_b"
    assert args.test_domains == ["1", "2"]


def test_file_gives_defaults_and_the_command_line_wins(parser, tmp_path):
    path = write(
        tmp_path / "run.yaml",
        batch_size=8,
        pretrained=True,
        test_envs=[1, 2],
        hparams={"lr": 0.001},
        model_kwargs={"moe_layers": [8, 10], "router": "linear"},
        data_dir=None,
    )
    args = parse_arguments(parser, ["-c", path, "--test-domains", "@3"])
    assert (args.batch_size, args.pretrained, args.test_domains, args.data_dir) == (8, True, [3], None)
    assert args.hparams == {"lr": 0.001}
    assert dict(args.model_kwargs) == {"moe_layers": [8, 10], "router": "linear"}
    assert parse_arguments(parser, ["-c", path, "--no-pretrained"]).pretrained is False
    saved = write(tmp_path / "args.yaml", batch_size=4, amp_dtype="float16")
    args = parse_arguments(parser, ["-c", path], tmp_path / "args.yaml")
    assert (args.batch_size, args.amp_dtype, args.config) == (8, "float16", path)
    assert saved


def test_parsed_values_can_be_written_and_parsed_again(parser, tmp_path):
    words = ["--batch-size", "4", "--model-kwargs", "num_experts=4", "router='linear'", "--hparams", '{"lr": 1e-05}']
    args = parse_arguments(parser, words)
    args.model_kwargs = dict(args.model_kwargs)
    path = write(tmp_path / "args.yaml", **vars(args))
    again = parse_arguments(parser, ["--config", path])
    assert {**vars(again), "model_kwargs": dict(again.model_kwargs), "config": None} == vars(args)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("bath_size: 8", r"config='.*run.yaml': 'bath_size' is not an option of tool.py"),
        ("- 1\n- 2", "holds no table of options"),
        ("a: [1", "cannot be read as YAML"),
        ("config: base.yaml", r"config='.*run.yaml': names a file itself, 'base.yaml'; write its options here"),
    ],
)
def test_bad_files(parser, tmp_path, content, complaint):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ArgumentError, match=complaint):
        parse_arguments(parser, ["-c", str(tmp_path / "run.yaml")])


def test_missing_file(parser, tmp_path):
    with pytest.raises(ArgumentError, match=r"config='.*nowhere.yaml': cannot be read"):
        parse_arguments(parser, ["-c", str(tmp_path / "nowhere.yaml")])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"amp_dtype": "float8"}, "argument --amp-dtype: invalid choice: 'float8'"),
        ({"batch_size": 1.5}, "argument -b/--batch-size: '1.5' is not a whole number from 1 to 2147483647"),
        ({"model_kwargs": ["a"]}, "argument --model-kwargs: 'a' is not of the form KEY=VALUE"),
        ({"pretrained": "maybe"}, "argument --pretrained/--no-pretrained: ignored explicit argument 'maybe'"),
    ],
)
def test_values_in_a_file_pass_the_same_checks(parser, tmp_path, capsys, entry, message):
    with pytest.raises(SystemExit):
        parse_arguments(parser, ["-c", write(tmp_path / "run.yaml", **entry)])
    assert message in capsys.readouterr().err


@dataclass(frozen=True)
class Toy:
    """Options."""

    steps: int = option(5, "-n", "--iterations", type=positive_int, help="how long")
    fast: bool = option(True, help="hurry")
    shape: str = option("round", choices=("round", "square"), shorthand=("--square", "square"), help="outline")
    extra: Mapping[str, object] = option({}, type=key_value, nargs="*", help="more")


def parse(*words):
    parser = argparse.ArgumentParser()
    add_options(parser, "toy", Toy)
    return from_parsed(Toy, vars(parser.parse_args(words))), parser.format_help()


def test_defaults_are_the_fields_and_tables_are_not_shared():
    toy, text = parse()
    assert toy == Toy()
    assert toy.extra is not Toy().extra
    assert "-n N" in text


def test_every_spelling_reaches_the_field():
    for spelling in ("-n", "--steps", "--iterations"):
        assert parse(spelling, "7")[0].steps == 7
    assert declared(Toy)["steps"].long_names() == ["iterations"]
    toy, _ = parse("--no-fast", "--square", "--extra", "a=1", "b=x")
    assert toy == Toy(fast=False, shape="square", extra={"a": 1, "b": "x"})


def test_choices_are_enforced(capsys):
    with pytest.raises(SystemExit):
        parse("--shape", "oval")
    assert "invalid choice: 'oval'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=4", 4),
        ("a=(8,10)", (8, 10)),
        ("a=None", None),
        ("a=cosine", "cosine"),
        ("a='4'", "4"),
        ("a=b=c", "b=c"),
        ("a=false", False),
        ("a=true", True),
        ("a=null", None),
        ("a='false'", "false"),
    ],
)
def test_key_value(text, expected):
    assert key_value(text) == ("a", expected)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (key_value, ["a", "=4"]),
        (json_object, ["{lr: 1}", "[1]"]),
        (positive_int, ["0", "-3", "2.5"]),
        (non_negative_int, ["-1", "0.5"]),
        (seed_number, ["4294967296"]),
        (non_negative, ["-0.1", "inf", "nan"]),
        (fraction, ["1", "-0.1"]),
        (int_from_2, ["1", "many"]),
        (fraction_to_1, ["0", "1.1", "much"]),
        (output_file, ["no such folder/file.json", "."]),
        (usable_device, ["gpu"]),
    ],
)
def test_bad_values(read, texts):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match="is not"):
            read(text)


@pytest.mark.parametrize("form", ["{run}", "{run}/best", "{run}/best/", "local-dir:{run}", "local-dir:{run}/best"])
def test_every_tool_takes_a_run_in_every_form(form, tmp_path):
    (tmp_path / "resnet50" / "best").mkdir(parents=True)
    (tmp_path / "resnet50" / "best" / "config.json").write_text("{}")
    run = tmp_path / "resnet50"
    text = form.format(run=run)
    for tool, further in (("evaluate", []), ("predict", ["image.png"]), ("export", [])):
        args = parse_arguments(load_tool(tool).build_parser(), ["--model", text, *further])
        assert args.model == f"local-dir:{run}/best"
    for tool, words in (("report", []), ("push_to_hub", ["--repo-id", "a/b"])):
        args = load_tool(tool).build_parser().parse_args([text, *words])
        assert vars(args)["folder" if tool == "report" else "run"] == run
    args = load_tool("visualize").build_parser().parse_args(["attention", text, "--twin", text])
    assert (args.run, args.twin) == (run, run)


def test_what_is_no_run_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("resnet50/best", "best", "plain", "sweep/best/run/best"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("resnet50/best", "plain", "sweep/best/run/best"):
        (tmp_path / name / "config.json").write_text("{}")
    assert model_source("resnet50") == "resnet50"  # a timm model, though a run is called so
    assert model_source("./resnet50") == "local-dir:resnet50/best"
    assert model_source("plain") == "local-dir:plain"  # a saved network that belongs to no run
    for text in ("hf-hub:owner/name", "nothing", "local-dir:nothing"):
        assert model_source(text) == text
    assert run_folder("resnet50") == Path("resnet50")
    assert run_folder("best") == Path("best")  # a folder of runs that happens to be called so
    assert run_folder("sweep/best") == Path("sweep/best")
    assert run_folder("nothing") == Path("nothing")


def test_good_values(tmp_path):
    assert [int_from_2("2"), positive_int("1"), non_negative_int("0"), seed_number("4294967295")] == [
        2,
        1,
        0,
        2**32 - 1,
    ]
    assert [non_negative("0"), non_negative("1e3"), fraction("0"), fraction("0.9")] == [0, 1000, 0, 0.9]
    assert (fraction_to_1("1"), seed_number("4294967295")) == (1, 2**32 - 1)
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert output_file("new.json").name == "new.json"
    assert usable_device("cpu") == "cpu"
    assert available_cpus() >= 1
