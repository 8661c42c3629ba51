"""Options: every role is declared with its option, and older names and runs keep their meaning."""

import argparse
from dataclasses import FrozenInstanceError, fields

import pytest

from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.cli.options import from_parsed
from timm_moe_dg.finetuning import run_parser
from timm_moe_dg.protocols.options import (
    DEFAULTS,
    DERIVED,
    FILLED_IN,
    NOT_IDENTITY,
    RunOptions,
    by_today_s_names,
    having,
)
from timm_moe_dg.protocols.run_identity import settings


def parse(*words):
    return from_parsed(RunOptions, vars(parse_arguments(run_parser(), words)))


def test_a_command_line_without_words_gives_the_declared_defaults():
    assert parse() == RunOptions()
    assert vars(parse()) == DEFAULTS
    with pytest.raises(FrozenInstanceError):
        parse().lr = 0.1


def test_the_parser_has_every_option_once():
    dests = [action.dest for action in run_parser()._actions if not isinstance(action, argparse._StoreConstAction)]
    assert sorted(dests) == sorted(["help", *(one.name for one in fields(RunOptions) if one.name != "filled_in")])


def test_what_is_filled_in_is_left_open_by_default():
    assert [DEFAULTS[name] for name in having(FILLED_IN)] == [None] * len(having(FILLED_IN))
    assert set(having(DERIVED)) <= set(having(FILLED_IN))


def test_the_name_of_domainbed_means_the_same(tmp_path):
    assert parse("--checkpoint-freq", "7") == parse("--eval-freq", "7") == parse("--checkpoint_freq=7")
    for name in ("eval_freq", "checkpoint_freq"):
        (tmp_path / "run.yaml").write_text(f"{name}: 7")
        assert parse("-c", str(tmp_path / "run.yaml")).eval_freq == 7
    assert by_today_s_names({"checkpoint_freq": 7, "test_envs": [1]}) == {"eval_freq": 7, "test_domains": [1]}
    assert by_today_s_names({"test_envs": [1], "test_domains": [1]}) == {"test_domains": [1]}


def test_rows_of_tables_are_told_apart_by_settings_alone():
    named = {"dataset": "toy", "trial_seed": 1, "lr": 0.1, "output": "a", "workers": 3, "format": 1, "output_dir": "b"}
    assert settings({**named, "steps": 5, "checkpoint_freq": 2, "model_kwargs": {"depth": 3}}) == {
        "steps": 5,
        "eval_freq": 2,
        "depth": 3,
    }
    assert {"config", "resume", "filled_in", "versions"} <= NOT_IDENTITY


def test_names_registered_on_higher_floors_are_listed_or_enforced(capsys):
    assert parse("--algorithm", "unheard of").algorithm == "unheard of"  # refused, with suggestions, when looked up
    with pytest.raises(SystemExit):
        parse("--sched", "unheard of")
    assert "invalid choice: 'unheard of'" in capsys.readouterr().err
    assert parse("--train-routers-only").freeze == "all-but-routers"
    assert parse("--model-kwargs", "depth=3", "router=linear").model_kwargs == {"depth": 3, "router": "linear"}
