"""Formats: what another release wrote is read, or refused by name."""

import pytest
import timm
import torch
import yaml

import timm_moe_dg
from tests.invented import make_record
from timm_moe_dg.errors import FormatError
from timm_moe_dg.protocols import Record
from timm_moe_dg.protocols.formats import FORMAT, read_arguments, read_repeatable, stamp


def written(path, **table):
    path.write_text(yaml.safe_dump(table))
    return path


def test_a_stamp_names_the_versions_that_count():
    versions = {"torch": torch.__version__, "timm": timm.__version__, "timm_moe_dg": timm_moe_dg.__version__}
    assert stamp() == {"format": FORMAT, "versions": versions}
    assert yaml.safe_load(yaml.safe_dump(stamp())) == stamp()


def test_arguments_without_a_number_are_read_under_today_s_names(tmp_path):
    path = written(tmp_path / "args.yaml", checkpoint_freq=3, steps=9)
    assert read_arguments(path, "run") == {"eval_freq": 3, "steps": 9}


def test_a_repeated_run_leaves_out_what_was_filled_in_and_what_is_of_one_start(tmp_path):
    table = {"lr": 0.1, "steps": 9, "resume": "auto", "config": "a.yaml", "filled_in": ["lr"], **stamp()}
    assert read_repeatable(str(written(tmp_path / "args.yaml", **table)), "config") == {"steps": 9}


@pytest.mark.parametrize("number", [FORMAT + 1, "2", None])
def test_another_format_is_refused_by_name(tmp_path, number):
    stamped = {"format": number, "versions": {"timm_moe_dg": "9.9"}}
    found = (
        rf"has format {number!r}, and this release reads up to {FORMAT}; use the one that wrote it \(timm_moe_dg 9.9\)"
    )
    with pytest.raises(FormatError, match=rf"run='.*args.yaml': {found}"):
        read_arguments(written(tmp_path / "args.yaml", **stamped), "run")
    record = make_record(args={**make_record().args, **stamped})
    with pytest.raises(FormatError, match=found):
        Record.from_json(record.to_json())
