"""Options: declarations, spellings, configuration files and keyword arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from timm_moe_dg.cli.arguments import add_options, declared, fields_of, from_parsed, option, parse_arguments
from timm_moe_dg.cli.arguments import checked as checked_fields
from timm_moe_dg.cli.tool import ToolParser
from timm_moe_dg.cli.values import json_object, key_value, position_or_name, positive_int
from timm_moe_dg.errors import ArgumentError, OptionError


@dataclass(frozen=True)
class Toy:
    """Options."""

    steps: int = option(5, "-n", "--iterations", type=positive_int, help="how long")
    fast: bool = option(True, help="hurry")
    shape: str = option("round", choices=("round", "square"), shorthand=("--square", "square"), help="outline")
    test_domains: Sequence[int | str] = option((), type=position_or_name, nargs="+", help="held out")
    bands: Sequence[str] = option((), nargs="+", help="channels")
    data_dir: str | None = option(None, help="where")
    extra: Mapping[str, object] = option({}, type=key_value, nargs="*", help="more")
    hparams: Mapping[str, object] = option({}, type=json_object, help="of a method")


@pytest.fixture
def parser():
    parser = ToolParser(prog="tool.py")
    parser.add_argument("-c", "--config")
    add_options(parser, "toy", Toy)
    return parser


@pytest.fixture
def parse(parser):
    return lambda *words, **more: from_parsed(Toy, vars(parse_arguments(parser, words, **more)))


def checked(values, strict=True):
    return checked_fields(fields_of(Toy), values, "finetune", strict=strict)


def write(path: Path, **table: object) -> str:
    path.write_text(yaml.safe_dump(table))
    return str(path)


def test_defaults_are_the_fields_and_tables_are_not_shared(parser, parse):
    assert parse() == Toy()
    assert parse().extra is not Toy().extra
    assert "--iterations N" in parser.format_help()
    assert declared(Toy)["steps"].long_names() == ["iterations"]


@pytest.mark.parametrize("words", [["-n", "7"], ["--steps", "7"], ["--iterations=7"]])
def test_every_spelling_reaches_the_field(parse, words):
    assert parse(*words).steps == 7


def test_hyphens_and_underscores_are_one_spelling_of_names_and_not_of_values(parse):
    given = parse("--data_dir=my_data/a_b", "--test_domains", "@1", "a_b", "--no-fast", "--square", "--extra", "a_b=1")
    expected = {"data_dir": "my_data/a_b", "test_domains": [1, "a_b"], "fast": False, "shape": "square"}
    assert given == Toy(**expected, extra={"a_b": 1})


def test_the_command_line_wins_over_a_file_and_a_file_over_saved_values(parse, tmp_path):
    table = {"steps": 8, "fast": False, "test_domains": [1, "b"], "hparams": {"lr": 0.001}, "data_dir": None}
    table["extra"] = {"moe_layers": [8, 10], "router": "linear", "x": "false"}
    path = write(tmp_path / "run.yaml", **table)
    assert parse("-c", path) == Toy(**table)
    changed = {"fast": True, "test_domains": [3], "extra": {**table["extra"], "x": 1}}
    assert parse("-c", path, "--fast", "--test-domains", "@3", "--extra", "x=1") == Toy(**{**table, **changed})
    saved = Path(write(tmp_path / "args.yaml", steps=4, shape="square"))
    assert parse("-c", path, saved=saved) == Toy(**table, shape="square")
    keywords = checked({"iterations": 3})
    assert parse(saved=saved, keywords=keywords) == Toy(steps=3, shape="square")


@pytest.mark.parametrize(
    "content",
    ["stebs: 8", "- 1\n- 2", "a: [1", "config: base.yaml", None],
    ids=["unknown option", "list", "no YAML", "another file", "missing"],
)
def test_bad_files_are_named(parser, tmp_path, content):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArgumentError, match=r"config='.*run.yaml': "):
        parse_arguments(parser, ["-c", str(path)])


@pytest.mark.parametrize("entry", [{"shape": "oval"}, {"steps": 1.5}, {"extra": ["a"]}, {"fast": "maybe"}])
def test_values_in_a_file_pass_the_checks_of_the_command_line(parser, tmp_path, entry):
    path = write(tmp_path / "run.yaml", **entry)
    (name,) = entry
    with pytest.raises(ArgumentError, match=rf"^config='.*run.yaml': {name}="):
        parse_arguments(parser, ["-c", path])


def test_keywords_are_what_words_give(parse):
    words = ["--iterations=7", "--test-domains", "@0", "b", "--extra", "moe_layers=(1,)", "kwargs={'a': 2}"]
    words += ["--hparams", '{"lr": 1e-05, "sizes": [1, 2]}', "--no-fast", "--data-dir", "a/b"]
    values = {"iterations": np.int64(7), "test_domains": [0, "b"], "hparams": {"lr": 1e-5, "sizes": (1, 2)}}
    values |= {"extra": {"moe_layers": (1,), "kwargs": {"a": np.int64(2)}}, "data_dir": Path("a/b"), "fast": False}
    assert Toy(**checked(values)) == parse(*words)
    for value in (np.array([2]), (2,), range(2, 3), 2):
        assert checked({"test_domains": value}) == {"test_domains": [2]}
    assert checked({"test_domains": []}) == {"test_domains": ["none"]}
    assert checked({"data_dir": None}) == {}
    assert checked({"data_dir": torch.device("cpu")}) == {"data_dir": "cpu"}
    assert checked({"bands": 665, "steps": "61"}, strict=False) == {"bands": ["665"], "steps": 61}


@pytest.mark.parametrize(
    "keywords",
    [
        {"steps": "61"},
        {"bands": [665]},
        {"steps": 61.0},
        {"steps": True},
        {"steps": 0},
        {"steps": None},
        {"fast": 1},
        {"fast": "yes"},
        {"shape": "sqare"},
        {"test_domains": [None]},
        {"bands": []},
        {"extra": {"act_layer": torch.nn.GELU}},
        {"extra": {1: 1}},
        {"hparams": [1]},
        {"extra": ["a"]},
    ],
    ids=str,
)
def test_keywords_that_cannot_work_are_named(keywords):
    ((name, value),) = keywords.items()
    with pytest.raises(ArgumentError, match=f"^{name}="):
        checked({name: value})


def test_an_unknown_keyword_is_answered_with_the_nearest():
    with pytest.raises(OptionError, match=r"^stebs=1: finetune has no such option; did you mean steps\?"):
        checked({"stebs": 1})
