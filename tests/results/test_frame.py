"""Runs as a frame: one row for each evaluation, with settings and scores in columns."""

import json
from dataclasses import replace

import pytest

from tests.invented import invented_records, write_run
from tests.results.test_domainbed_exchange import domainbed_row
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import headline_accuracy, training_domain_validation
from timm_moe_dg.results.runs import NO_MODEL, read_runs


def test_a_row_for_each_evaluation_with_its_settings(tmp_path):
    options = {"model_kwargs": {"moe_layers": [2, 3]}, "lr": 0.5, "output": "somewhere", "domains": ["a", "b", "c"]}
    scores = {"accuracy": 0.25, "worst_accuracy": 0.125, "f1_macro": 0.5}
    records = [
        replace(record, roles={"ood": scores}, hparams={"lr": 0.5, "irm_lambda": 2.0})
        for record in invented_records([1], **options)
    ]
    write_run(tmp_path / "a", records)
    write_run(tmp_path / "b", invented_records([0, 2], trial_seed=1, model="other"), finished=False)
    frame = read_runs(tmp_path)
    assert list(frame.finished) == [True] * 3 + [False] * 3
    assert list(frame.step) == [0, 300, 600] * 2
    assert set(frame.run) == {str(tmp_path / "a"), str(tmp_path / "b")}
    first = frame[frame.model == "vit"]
    assert (set(first.moe_layers), set(first.irm_lambda), set(first.lr)) == ({(2, 3)}, {2.0}, {0.5})
    assert (set(first.test_domains), set(first.domains), set(first.trial_seed)) == ({(1,)}, {("a", "b", "c")}, {0})
    assert set(frame.test_domains) == {(1,), (0, 2)}
    assert "output" not in frame  # paths have no effect on results
    (selected,) = frame[frame.selected & frame.finished].itertuples()
    record = training_domain_validation(records)
    assert selected.step == record.step
    assert [selected.env0_in_acc, selected.env1_in_acc, selected.env2_in_acc] == list(record.in_acc)
    assert selected.env2_out_acc == record.out_acc[2]
    assert selected.validation_acc == (record.out_acc[0] + record.out_acc[2]) / 2
    assert (selected.ood_worst_accuracy, selected.loss) == (0.125, 1.0)
    assert selected.test_acc == headline_accuracy(record) == scores["accuracy"]  # as in summary.csv
    (other,) = frame[frame.selected & ~frame.finished].itertuples()
    assert other.test_acc == (other.env0_in_acc + other.env2_in_acc) / 2
    assert frame.groupby(["model", "test_domains"]).size().tolist() == [3, 3]


def test_runs_of_domainbed_and_a_line_that_is_being_written(tmp_path):
    record = Record.from_json(json.dumps(domainbed_row(0, [2], 1)))
    folder = write_run(tmp_path / "a", [record], finished=False)
    with (folder / "results.jsonl").open("ab") as file:
        file.write('{"args": "é'.encode()[:-1])
    (row,) = read_runs(tmp_path).itertuples()
    assert (row.model, row.algorithm, row.test_domains, row.env2_in_acc) == (NO_MODEL, "CORAL", (2,), 0.75)
    (folder / "done").touch()
    with pytest.raises(RecordError, match="is not UTF-8"):
        read_runs(tmp_path)


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(RecordError, match=r"folder='.*': no run below it has an evaluation; give a folder with runs"):
        read_runs(tmp_path)
    with pytest.raises(RecordError, match="no such folder"):
        read_runs(tmp_path / "missing")
