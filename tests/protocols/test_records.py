"""Records: rows go out and come back unchanged, DomainBed's rows are understood, damaged ones are named."""

import json
import math

import pytest

from tests.invented import ARGS, make_record
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols import Record, read_records

# As DomainBed's train.py writes it: no task_loss, other arguments, keys sorted
DOMAINBED_ROW = json.dumps(
    {
        "args": {**ARGS, "uda_holdout_fraction": 0, "output_dir": "out", "skip_model_save": False},
        "env0_in_acc": 0.9,
        "env0_out_acc": 0.6,
        "env1_in_acc": 0.8,
        "env1_out_acc": 0.5,
        "env2_in_acc": 0.7,
        "env2_out_acc": 0.4,
        "epoch": 1.5,
        "hparams": {"lr": 5e-05, "batch_size": 32, "resnet18": False, "nonlinear_classifier": False},
        "loss": 0.5,
        "penalty": 0.03,
        "mem_gb": 3.5,
        "step": 300,
        "step_time": 0.125,
    },
    sort_keys=True,
)


def test_round_trip():
    record = make_record()
    assert Record.from_json(record.to_json()) == record
    assert "\n" not in record.to_json()


def test_out_losses_are_kept_by_domain():
    record = make_record(out_loss=(0.25, 1.5, float("inf")))
    assert json.loads(record.to_json())["env1_out_loss"] == 1.5
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(RecordError, match="env1_out_loss"):
        Record.from_json(record.to_json().replace("env2_out_loss", "env3_out_loss"))


def test_keys_are_those_of_domainbed():
    row = json.loads(make_record().to_json())
    assert set(row) == set(json.loads(DOMAINBED_ROW)) - {"penalty"} | {"task_loss"}
    assert (row["env1_in_acc"], row["env2_out_acc"]) == (0.8, 0.4)


def test_rows_of_domainbed_are_read():
    record = Record.from_json(DOMAINBED_ROW)
    assert record.losses == {"loss": 0.5, "penalty": 0.03}
    assert record.in_acc == (0.9, 0.8, 0.7)
    assert record.test_domains == (1,)
    assert record.training_domains == (0, 2)
    assert record.to_json() == DOMAINBED_ROW


def test_ten_and_more_domains_stay_in_order():
    accuracies = tuple(domain / 100 for domain in range(12))
    record = make_record(in_acc=accuracies, out_acc=accuracies[::-1])
    assert Record.from_json(record.to_json()) == record


def test_empty_split_survives_as_nan():
    record = Record.from_json(make_record(out_acc=(0.6, float("nan"), 0.4)).to_json())
    assert math.isnan(record.out_acc[1])


def changed(**changes):
    row = json.loads(DOMAINBED_ROW)
    for key, value in changes.items():
        if value is None:
            del row[key]
        else:
            row[key] = value
    return json.dumps(row)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (DOMAINBED_ROW[:100], "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        (changed(step=None), "lacks step"),
        (changed(args={"dataset": "PACS"}), r"lacks args\['algorithm'\], args\['test_envs'\]"),
        (changed(env1_in_acc=None), "expected env0_in_acc, env0_out_acc, env1_in_acc"),
        (changed(env999999999_in_acc=0.5), "expected env0_in_acc, env0_out_acc, env1_in_acc"),
        (DOMAINBED_ROW.replace('"env1_in_acc": 0.8', '"env1_in_acc": null'), "env1_in_acc=None: is no number"),
        (DOMAINBED_ROW.replace('"loss": 0.5', '"loss": "high"'), "loss='high': is no number"),
        (changed(step="300"), "step='300': is no number"),
        (changed(args=[1]), r"args=\[1\]: is no JSON object"),
        (json.dumps({**json.loads(DOMAINBED_ROW), "args": None}), "args=None: is no JSON object"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=[
        "cut off",
        "list",
        "no step",
        "no args",
        "gap",
        "huge key",
        "null",
        "text",
        "step",
        "list of args",
        "null args",
        "deep",
    ],
)
def test_damaged_rows(line, complaint):
    with pytest.raises(RecordError, match=complaint):
        Record.from_json(line)


def test_file_round_trip_and_the_line_of_a_damaged_row(tmp_path):
    path = tmp_path / "results.jsonl"
    records = [make_record(step=step) for step in (0, 300, 600)]
    path.write_text("".join(record.to_json() + "\n" for record in records))
    assert read_records(path) == records
    path.write_text(path.read_text() + DOMAINBED_ROW[:50])
    with pytest.raises(RecordError, match=r"results\.jsonl, line 4: .*may be cut off"):
        read_records(path)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(RecordError, match=r"results\.jsonl: is not UTF-8 text"):
        read_records(path)
