"""Command lines: spellings, configuration files, and values that are not words."""

import argparse

import pytest
import yaml

from timm_moe_dg.cli.arguments import (
    available_cpus,
    fraction,
    fraction_to_1,
    int_from_2,
    json_object,
    key_value,
    non_negative,
    non_negative_int,
    output_file,
    parse_arguments,
    positive_int,
    usable_device,
)
from timm_moe_dg.errors import ArgumentError


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser(prog="tool.py")
    parser.add_argument("-c", "--config")
    parser.add_argument("-b", "--batch-size", type=positive_int, default=32)
    parser.add_argument("--test-domains", "--test-envs", type=int, nargs="+", default=[0])
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
    assert args.test_domains == [1, 2]


def test_file_gives_defaults_and_the_command_line_wins(parser, tmp_path):
    path = write(
        tmp_path / "run.yaml",
        batch_size=8,
        pretrained=True,
        test_domains=[1, 2],
        hparams={"lr": 0.001},
        model_kwargs={"moe_layers": [8, 10], "router": "linear"},
        data_dir=None,
    )
    args = parse_arguments(parser, ["-c", path, "--test-domains", "3"])
    assert (args.batch_size, args.pretrained, args.test_domains, args.data_dir) == (8, True, [3], None)
    assert args.hparams == {"lr": 0.001}
    assert dict(args.model_kwargs) == {"moe_layers": [8, 10], "router": "linear"}
    assert parse_arguments(parser, ["-c", path, "--no-pretrained"]).pretrained is False


def test_what_was_parsed_can_be_written_and_parsed_again(parser, tmp_path):
    words = ["--batch-size", "4", "--model-kwargs", "num_experts=4", "router='linear'", "--hparams", '{"lr": 1e-05}']
    args = parse_arguments(parser, words)
    args.model_kwargs = dict(args.model_kwargs)
    path = write(tmp_path / "args.yaml", **vars(args))
    again = parse_arguments(parser, ["--config", path])
    assert {**vars(again), "model_kwargs": dict(again.model_kwargs), "config": None} == vars(args)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("bath_size: 8", "'bath_size' is no option of tool.py"),
        ("help: true", "'help' is no option"),
        ("- 1\n- 2", "holds no table of options"),
        ("a: [1", "cannot be read as YAML"),
    ],
)
def test_bad_files(parser, tmp_path, content, complaint):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ArgumentError, match=complaint):
        parse_arguments(parser, ["-c", str(tmp_path / "run.yaml")])


def test_missing_file(parser, tmp_path):
    with pytest.raises(ArgumentError, match=r"config='.*nowhere.yaml': cannot be read"):
        parse_arguments(parser, ["-c", str(tmp_path / "nowhere.yaml")])


def test_values_in_a_file_pass_the_same_checks(parser, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(parser, ["-c", write(tmp_path / "run.yaml", amp_dtype="float8")])
    assert "--amp-dtype: invalid choice: 'float8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=4", 4), ("a=(8,10)", (8, 10)), ("a=None", None), ("a=cosine", "cosine"), ("a='4'", "4"), ("a=b=c", "b=c")],
)
def test_key_value(text, expected):
    assert key_value(text) == ("a", expected)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (key_value, "a"),
        (key_value, "=4"),
        (json_object, "{lr: 1}"),
        (json_object, "[1]"),
        (positive_int, "0"),
        (positive_int, "-3"),
        (positive_int, "2.5"),
        (non_negative_int, "-1"),
        (non_negative_int, "0.5"),
        (non_negative, "-0.1"),
        (non_negative, "inf"),
        (non_negative, "nan"),
        (fraction, "1"),
        (fraction, "-0.1"),
        (int_from_2, "1"),
        (int_from_2, "many"),
        (output_file, "no such folder/file.json"),
        (usable_device, "gpu"),
        (fraction_to_1, "0"),
        (fraction_to_1, "1.1"),
        (fraction_to_1, "much"),
    ],
)
def test_bad_values(read, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        read(text)


def test_files_and_devices(tmp_path):
    assert output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert output_file("new.json").name == "new.json"
    assert usable_device("cpu") == "cpu"


def test_ends_of_ranges():
    assert [int_from_2("2"), positive_int("1"), non_negative_int("0")] == [2, 1, 0]
    assert [non_negative("0"), non_negative("1e3"), fraction("0"), fraction("0.9"), fraction_to_1("1")] == [
        0,
        1000,
        0,
        0.9,
        1,
    ]


def test_there_is_a_cpu():
    assert available_cpus() >= 1
