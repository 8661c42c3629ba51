"""Records: rows go out and come back unchanged, DomainBed's rows are understood, damaged ones are named."""

import json

import pytest

from tests.invented import ARGS, make_record
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record, read_records

# As DomainBed's train.py writes it: no task_loss, other arguments, keys sorted
ROW = {
    "args": {**ARGS, "uda_holdout_fraction": 0, "output_dir": "out", "skip_model_save": False},
    **{"env0_in_acc": 0.9, "env1_in_acc": 0.8, "env2_in_acc": 0.7},
    **{"env0_out_acc": 0.6, "env1_out_acc": 0.5, "env2_out_acc": 0.4},
    "hparams": {"lr": 5e-05, "batch_size": 32, "resnet18": False, "nonlinear_classifier": False},
    **{"epoch": 1.5, "loss": 0.5, "penalty": 0.03, "mem_gb": 3.5, "step": 300, "step_time": 0.125},
}
DOMAINBED_ROW = json.dumps(ROW, sort_keys=True)
SCORES = dict.fromkeys(("accuracy", "worst_accuracy", "f1_macro"), 0.5)


def test_rows_of_domainbed_are_read_and_ours_have_its_keys():
    record = Record.from_json(DOMAINBED_ROW)
    assert record.losses == {"loss": 0.5, "penalty": 0.03}
    assert record.in_acc == (0.9, 0.8, 0.7)
    assert (record.test_domains, record.training_domains) == ((1,), (0, 2))
    assert record.to_json() == DOMAINBED_ROW
    row = json.loads(make_record().to_json())
    assert set(row) == set(ROW) - {"penalty"} | {"task_loss"}
    assert (row["env1_in_acc"], row["env2_out_acc"]) == (0.8, 0.4)


def test_out_losses_are_kept_by_domain():
    record = make_record(out_loss=(0.25, 1.5, float("inf")))
    assert json.loads(record.to_json())["env1_out_loss"] == 1.5
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(RecordError, match="env1_out_loss"):
        Record.from_json(record.to_json().replace("env2_out_loss", "env3_out_loss"))


def test_ten_and_more_domains_stay_in_order():
    accuracies = tuple(domain / 100 for domain in range(12))
    record = make_record(in_acc=accuracies, out_acc=accuracies[::-1])
    assert Record.from_json(record.to_json()) == record


DAMAGED = [  # the name in the message, and changes of a row
    ("step", {"step": "300"}),
    ("args", {"args": [1]}),
    ("lacks algorithm", {"args": {"dataset": "PACS"}}),
    ("hparams", {"hparams": None}),
    ("env0_in_acc", {"env0_in_acc": None}),
    ("env0_in_acc", {"env0_in_acc": True}),
    ("scores", {"env999999999_in_acc": 0.5}),
    ("loss", {"loss": "high"}),
    ("roles", {"roles": 5}),
    ("ood", {"roles": {"ood": 5}}),
    ("lacks worst_accuracy, f1_macro", {"roles": {"ood": {"accuracy": 1}}}),
    ("accuracy", {"roles": {"ood": {**SCORES, "accuracy": "x"}}}),
    ("num_samples", {"roles": {"ood": {**SCORES, "num_samples": 3}}}),
    ("a", {"roles": {"ood": {**SCORES, "group_accuracy": {"a": "1"}}}}),
    ("worst_group", {"roles": {"ood": {**SCORES, "worst_group": 3}}}),
    ("metrics", {"metrics": [1]}),
    ("auc", {"metrics": {"auc": 0.1}}),
    ("metrics", {"metrics": {"auc": [0.1]}}),
]
DAMAGED_ARGUMENTS = [
    *(("dataset", ["x"]), ("algorithm", None), ("trial_seed", [1]), ("trial_seed", True), ("versions", "1")),
    *(("test_envs", None), ("test_envs", [[0]]), ("test_envs", [3]), ("test_envs", [-1]), ("domains", [[1]])),
    *(("split_sizes", [1, 2, 3]), ("split_sizes", [[1, 2]]), ("split_sizes", [[1, 2, 3]] * 3)),
    *(("domain_facts", [["train", 1, "random"]]), ("average_of", "a"), ("average_method", 5)),
    # Options of a run, by their annotations
    *(("args: model", ["x"]), ("args: holdout_fraction", "0.2"), ("args: momentum", None), ("args: model_kwargs", [1])),
    *(("args: metadata_columns", [1]), ("args: mean", ["x"]), ("args: pretrained", 1.5), ("args: filled_in", 5)),
    *(("args: coverage_radius", []), ("args: initial_checkpoint", 5)),
]
DAMAGED += [(name, {"args": {**ROW["args"], name.removeprefix("args: "): value}}) for name, value in DAMAGED_ARGUMENTS]


@pytest.mark.parametrize(("name", "changes"), DAMAGED, ids=str)
def test_damaged_rows_are_refused_by_the_name_of_the_field(name, changes):
    with pytest.raises(RecordError, match=rf"^{name}\b"):
        Record.from_json(json.dumps(ROW | changes))


@pytest.mark.parametrize(("name", "lacking"), [("lacks step, epoch", ("step", "epoch")), ("scores", ("env1_in_acc",))])
def test_missing_fields_are_named(name, lacking):
    with pytest.raises(RecordError, match=f"^{name}"):
        Record.from_json(json.dumps({key: value for key, value in ROW.items() if key not in lacking}))


def test_rows_of_a_file_come_back_and_share_their_arguments(tmp_path):
    path = tmp_path / "results.jsonl"
    records = [make_record(step=step) for step in (0, 300, 600)]
    records += [make_record(args={**records[0].args, "model_kwargs": {"x": value}}) for value in (1, True)]
    path.write_text("".join(record.to_json() + "\n" for record in records))
    again = read_records(path)
    assert again == records
    assert again[0].args is again[1].args is again[2].args
    assert [type(record.args["model_kwargs"]["x"]) for record in again[3:]] == [int, bool]
    with path.open("a") as file:
        file.write(DOMAINBED_ROW[:100])  # a line that is being written
    assert read_records(path, unfinished=True) == records


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (f"{DOMAINBED_ROW}\n{DOMAINBED_ROW[:100]}".encode(), ", line 2: record="),
        (b"\xff\xfe\x00binary", ": "),
        (b"[" * 200_000, ", line 1: record="),
        (b'{"a":' * 50_000, ", line 1: record="),
        (b'{"step": ' + b"9" * 5000 + b"}", ", line 1: record="),
        (b"[1, 2]", ", line 1: record="),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_lines_are_named(tmp_path, content, place):
    path = tmp_path / "results.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=rf"^.*results\.jsonl{place}"):
        read_records(path)
