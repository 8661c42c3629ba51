"""Options declared as fields: one line gives default, spellings, type and help."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from timm_moe_dg.cli.arguments import key_value, positive_int
from timm_moe_dg.cli.options import add_options, declared, from_parsed, option


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


def test_defaults_are_the_fields_and_tables_are_nobody_else_s():
    found, text = parse()
    assert found == Toy()
    assert found.extra is not Toy().extra
    assert "-n N" in text


def test_every_spelling_reaches_the_field():
    for spelling in ("-n", "--steps", "--iterations"):
        assert parse(spelling, "7")[0].steps == 7
    assert declared(Toy)["steps"].long_names() == ["iterations"]
    found, _ = parse("--no-fast", "--square", "--extra", "a=1", "b=x")
    assert found == Toy(fast=False, shape="square", extra={"a": 1, "b": "x"})


def test_choices_are_enforced(capsys):
    with pytest.raises(SystemExit):
        parse("--shape", "oval")
    assert "invalid choice: 'oval'" in capsys.readouterr().err
