"""The output folder is complete or absent at every moment, and checkpoints come back bit for bit."""

import csv
import errno
import math
import os
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import yaml
from torch.utils._pytree import tree_flatten

from tests.invented import ARGS, make_record
from tests.storage.toy_runs import STEPS, content, run
from timm_moe_dg.errors import ArgumentError, CheckpointError, RecordError, StorageError
from timm_moe_dg.protocols.options import FURTHER_RULES
from timm_moe_dg.protocols.records import Record, read_records
from timm_moe_dg.storage.run_folder import Checkpoints, RunFolder, read_checkpoint, summary_row, summary_table

SETTINGS = {"model": "gmoe_tiny_patch16", "test_domains": [1], "lr": 5e-4, "model_kwargs": {"moe_layers": (8, 10)}}


def saving(text):
    def save(folder):
        folder.mkdir(exist_ok=True)
        (folder / "model").write_text(text)

    return save


def failing(folder):
    saving("half")(folder)
    raise OSError("No space left on device")


def at(step, *out_acc):
    return make_record(step=step, out_acc=out_acc)


def test_files_of_a_run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a", SETTINGS)
    records = [at(0, 0.5, 0.0, 0.1), at(300, 0.7, 0.0, 0.7), at(600, 0.6, 1.0, 0.7)]
    for record in records:
        folder.add(record, saving(f"step {record.step}"))
    assert not (folder.path / "done").exists()
    folder.finish()
    assert (folder.path / "done").read_text() == "done\n"
    assert sorted(entry.name for entry in folder.path.iterdir()) == [
        "args.yaml",
        "best",
        "done",
        "results.jsonl",
        "summary.csv",
    ]
    assert [entry.name for entry in folder.path.parent.iterdir()] == ["a"]
    assert read_records(folder.path / "results.jsonl") == records
    assert folder.selected is records[1]
    assert (folder.path / "best" / "model").read_text() == "step 300"
    settings = yaml.safe_load((folder.path / "args.yaml").read_text())
    assert settings == {**SETTINGS, "model_kwargs": {"moe_layers": [8, 10]}}
    with (folder.path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "300", "600"]
    assert [float(row["validation_acc"]) for row in rows] == pytest.approx([0.3, 0.7, 0.65])
    assert [float(row["test_acc"]) for row in rows] == [0.8, 0.8, 0.8]
    assert (rows[1]["loss"], rows[1]["env1_out_acc"], rows[1]["env2_in_acc"]) == ("0.5", "0.0", "0.7")


NETWORKS = {
    "best": "step 600",
    "best_oracle": "step 600",
    "best_ood_worst_group": "step 0",
    "best_ood_f1_macro": "step 300",
}


@pytest.mark.parametrize(
    "rules", [None, [], ["oracle"], ["ood_f1_macro", "ood_worst_group"], [*FURTHER_RULES]], ids=str
)
def test_networks_of_the_rules_to_save(tmp_path, rules):
    folder = RunFolder(tmp_path / "a", {**SETTINGS, "save_rules": rules})
    worst_and_f1 = {0: (0.4, 0.1), 300: (0.2, 0.3), 600: (0.3, 0.2)}
    for step, (worst, f1) in worst_and_f1.items():
        roles = {"ood_val": {"worst_accuracy": worst, "f1_macro": f1}}
        folder.add(make_record(step=step, out_acc=(step / 600, 0.0, 0.5), roles=roles), saving(f"step {step}"))
    networks = {path.name: (path / "model").read_text() for path in folder.path.iterdir() if path.is_dir()}
    assert networks == {name: NETWORKS[name] for name in ("best", *(f"best_{rule}" for rule in rules or ()))}


@pytest.mark.parametrize("rules", [None, ["oracle"]], ids=str)
def test_a_resumed_run_keeps_saving_what_it_has_saved(tmp_path, rules):
    """Runs of earlier versions have networks of all rules, and no such option."""
    folder = RunFolder(tmp_path / "a", {**ARGS, "save_rules": ["oracle"]})
    for step in (0, 300):
        folder.add(make_record(step=step), saving(f"step {step}"))
    resumed = RunFolder(tmp_path / "a", {**ARGS, "save_rules": rules}, resume=True)
    resumed.read_back(300)
    resumed.cut_back()
    resumed.add(make_record(step=600, out_acc=(0.0, 0.0, 0.0)), saving("step 600"))
    assert (folder.path / "best_oracle" / "model").read_text() == "step 600"


def test_a_run_without_test_domains_has_no_oracle(tmp_path):
    folder = RunFolder(tmp_path / "a", {**SETTINGS, "save_rules": ["oracle"]})
    for step in (0, 300):
        folder.add(make_record(step=step, args={**ARGS, "test_envs": []}), saving(f"step {step}"))
    assert sorted(path.name for path in folder.path.iterdir() if path.is_dir()) == ["best"]
    with (folder.path / "summary.csv").open() as file:
        assert [row["test_acc"] for row in csv.DictReader(file)] == ["nan", "nan"]


def test_summary_has_the_reported_score_where_the_data_has_test_domains_of_its_own():
    scores = {"accuracy": 0.25, "worst_accuracy": 0.1, "worst_group": "a", "f1_macro": 0.2}
    record = make_record(roles={"id": {**scores, "accuracy": 0.9}, "ood": scores})
    assert summary_row(record)["test_acc"] == 0.25


def test_a_failure_leaves_nothing_of_the_first_evaluation_and_keeps_the_best_network(tmp_path):
    with pytest.raises(OSError, match="No space left"):
        RunFolder(tmp_path / "a", SETTINGS).add(at(0, 0.5, 0.5, 0.5), failing)
    assert list(tmp_path.iterdir()) == []
    folder = RunFolder(tmp_path / "a", SETTINGS)
    folder.add(at(0, 0.1, 0.1, 0.1), saving("good"))
    with pytest.raises(OSError, match="No space left"):
        folder.add(at(300, 0.9, 0.9, 0.9), failing)
    assert (folder.path / "best" / "model").read_text() == "good"
    assert not [entry for entry in folder.path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize(("name", "state"), [("done", "a finished run"), ("notes.txt", "files of another run")])
def test_folder_of_another_run_is_refused(tmp_path, name, state):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text("")
    with pytest.raises(ArgumentError, match=rf"output='.*a': holds {state}; give another --output or --experiment"):
        RunFolder(tmp_path / "a", ARGS)


def test_a_folder_that_is_filled_while_the_run_starts_is_not_replaced(tmp_path):
    folder = RunFolder(tmp_path / "a", SETTINGS)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("years of work")
    with pytest.raises(StorageError, match=r"was filled by something else while the run was starting"):
        folder.add(at(0, 0.5, 0.5, 0.5), saving("x"))
    assert (tmp_path / "a" / "thesis.txt").read_text() == "years of work"


def test_columns_of_the_summary_keep_their_order_when_records_are_read_back():
    records = [replace(make_record(step=step), losses={"task": 1.5, "loss": 2.0, "aux": 0.5}) for step in (0, 3)]
    again = [Record.from_json(record.to_json()) for record in records]
    assert summary_table(again) == summary_table(records)


def append(rest):
    def change(path):
        with (path / "results.jsonl").open("ab") as file:
            file.write(rest)

    return change


def cut(path):
    text = (path / "results.jsonl").read_text()
    (path / "results.jsonl").write_text(text[:-9])


def damage(path):
    (path / "checkpoints" / "step-000004.pt").write_bytes(b"damaged")


ADDED = [append(rest) for rest in (b"", b'{"step": 6, "epo', b"\xff\xfe")]  # a last line that was cut is dropped


# Step 5 is just after an evaluation, and 6 between two. An evaluation is repeated if its line was cut, and dropped and
# repeated if it is after the checkpoint
@pytest.mark.parametrize(("upto", "change"), [*product((5, 6), ADDED), (5, cut), (5, damage)])
def test_a_resumed_run_has_the_files_of_one_that_was_left_alone(tmp_path, upto, change):
    run(tmp_path / "whole")
    run(tmp_path / "a", upto=upto)
    change(tmp_path / "a")
    run(tmp_path / "a", resume=True)
    assert content(tmp_path / "a") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read .*No such file.*; restore the file, or start another run with --experiment"),
        (b"\xff\n", "cannot be read .*utf-8"),
        (b'{"step": 0\n', "cannot be read .*is not JSON"),
        (b"", "holds no evaluation up to step 5; start another run with --experiment"),
    ],
)
def test_results_that_are_damaged_are_refused_and_left_alone(tmp_path, text, complaint):
    run(tmp_path / "a", upto=6)
    path = tmp_path / "a" / "results.jsonl"
    path.unlink() if text is None else path.write_bytes(text)
    before = content(tmp_path / "a")
    with pytest.raises(RecordError, match=f"results.jsonl: {complaint}"):
        run(tmp_path / "a", resume=True)
    assert content(tmp_path / "a") == before


def test_a_finished_run_takes_more_steps_and_no_others(tmp_path):
    run(tmp_path / "a", can_go_on=True)
    args = {**ARGS, "steps": STEPS}
    with pytest.raises(ArgumentError, match="holds a finished run"):
        RunFolder(tmp_path / "a", args, resume=True)
    length = {"steps": 20, "epochs": 2.0, "filled_in": ["steps"]}
    folder = RunFolder(tmp_path / "a", {**args, **length}, resume=True)
    assert (tmp_path / "a" / "done").exists()
    folder.read_back(6)
    folder.cut_back()
    assert not (tmp_path / "a" / "done").exists()
    for record in read_records(tmp_path / "a" / "results.jsonl"):
        assert {name: record.args[name] for name in length} == length  # tables and cards tell it from any record
    assert yaml.safe_load((tmp_path / "a" / "args.yaml").read_text())["steps"] == 20


def nested(seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(3, 4)
    return {
        "step": 7,
        "state": {
            0: {"exp_avg": weight, "step": torch.tensor(3.0)},
            1: {"exp_avg": weight, "empty": torch.zeros(0, 2)},
        },
        "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-4, "fused": None, "params": [0, 1]}],
        "transposed": weight.t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": weight.to(torch.bfloat16),
        "a.b": torch.tensor([True]),
        "a": {"b": torch.tensor(5), "text": "x", "limit": math.inf},
    }


def assert_same(actual, expected):
    (leaves, structure), (others, other_structure) = map(tree_flatten, (actual, expected))
    assert structure == other_structure
    for leaf, other in zip(leaves, others, strict=True):
        assert type(leaf) is type(other)
        if isinstance(other, torch.Tensor):
            assert (leaf.dtype, leaf.stride()) == (other.dtype, other.stride())
        assert torch.equal(leaf, other) if isinstance(other, torch.Tensor) else leaf == other


def test_nested_states_come_back_bit_for_bit(tmp_path):
    path = Checkpoints(tmp_path).save(7, nested())
    assert_same(read_checkpoint(path), nested())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000007.pt"]


def test_the_last_two_are_kept_in_order_of_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for name in ("step-copy.pt", ".step-000003.pt.new"):  # the second is of a kill
        (tmp_path / name).touch()
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.save(step, {"step": step})
    names = ["step-1000000.pt", "step-1000001.pt", "step-copy.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoints.newest() == {"step": 1_000_001}


@pytest.mark.parametrize("damage", ["cut off", "one bit", "not text", "empty"])
def test_damage_is_reported_and_the_one_before_used(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, nested(step))
    path = tmp_path / "step-000002.pt"
    data = bytearray(path.read_bytes())
    weight = data.index(nested(2)["transposed"].t().contiguous().numpy().tobytes())
    cut = data[: len(data) // 2]
    data[weight] ^= 1
    path.write_bytes({"cut off": cut, "one bit": data, "not text": b"\xff", "empty": b""}[damage])
    assert_same(checkpoints.newest(), nested(1))
    assert "step-000002.pt': is damaged (" in caplog.text
    assert "using the checkpoint before it" in caplog.text


def test_a_full_disk_leaves_those_before_intact(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, nested(step))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(content, file):
        file.write(b"half")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as torch's writer does)

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(StorageError, match=r"step-000003.pt': cannot be written .*No space left.*free some space"):
        checkpoints.save(3, nested(3))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match="scalar"):
        Checkpoints(tmp_path).save(1, {"algorithm": {"rate": np.float64(0.5)}})
    assert Checkpoints(tmp_path).newest() is None
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_was_removed_does_not_come_back(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        Checkpoints(tmp_path / "removed" / "checkpoints").save(1, {})
    assert not list(tmp_path.iterdir())
