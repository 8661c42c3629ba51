"""Options of a run: each is declared once, and every spelling means the same."""

import argparse
from dataclasses import FrozenInstanceError, fields

import pytest

from timm_moe_dg.cli.arguments import from_parsed, parse_arguments
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.protocols.options import DEFAULTS, FILLED_IN, RunOptions, canonical_names, run_parser


def parse(*words):
    return from_parsed(RunOptions, vars(parse_arguments(run_parser(), words)))


def test_a_command_line_without_words_gives_the_declared_defaults():
    assert parse() == RunOptions()
    assert vars(parse()) == DEFAULTS
    assert [DEFAULTS[name] for name in sorted(FILLED_IN)] == [None] * len(FILLED_IN)
    with pytest.raises(FrozenInstanceError):
        parse().lr = 0.1


def test_the_parser_has_every_option_once():
    dests = [action.dest for action in run_parser()._actions if not isinstance(action, argparse._StoreConstAction)]
    names = [item.name for item in fields(RunOptions) if item.name != "filled_in"]
    assert sorted(dests) == sorted(["help", "help_all", "imports", "list_datasets", *names])


def test_further_spellings_mean_the_same(tmp_path):
    assert parse("--checkpoint-freq", "7") == parse("--eval-freq", "7") == parse("--checkpoint_freq=7")
    for name in ("eval_freq", "checkpoint_freq"):
        (tmp_path / "run.yaml").write_text(f"{name}: 7")
        assert parse("-c", str(tmp_path / "run.yaml")).eval_freq == 7
    assert canonical_names({"checkpoint_freq": 7, "test_envs": [1]}) == {"eval_freq": 7, "test_domains": [1]}
    assert canonical_names({"test_envs": [1], "test_domains": [1]}) == {"test_domains": [1]}
    assert parse("--train-routers-only").freeze == "all-but-routers"
    assert parse("--model-kwargs", "depth=3", "router=linear").model_kwargs == {"depth": 3, "router": "linear"}


def test_values_are_checked_by_the_parser_or_where_they_are_used(capsys, tmp_path):
    assert parse("--algorithm", "unheard of").algorithm == "unheard of"  # refused, with suggestions, when looked up
    with pytest.raises(SystemExit):
        parse("--sched", "unheard of")
    assert capsys.readouterr().err.startswith("finetune.py: error: sched='unheard of': choose from cosine")
    for part in ("trunk:0", "trunk:x", "stem"):
        with pytest.raises(SystemExit):
            parse("--freeze", part)
        assert f"freeze='{part}': is none of backbone, classifier" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("steps: 1.5")
    with pytest.raises(ArgumentError, match=r"run\.yaml': steps=1\.5: must be a whole number"):
        parse("-c", str(tmp_path / "run.yaml"))
