"""Runs as a frame and as rows of tables, and models per region, each on its own, joined by hand."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from tests.invented import invented_records, write_run
from tests.results.cells import run_of
from tests.results.test_domainbed_exchange import domainbed_row
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import headline_score, training_domain_validation
from timm_moe_dg.results.runs import (
    NO_MODEL,
    FinishedRun,
    by_row,
    domain_names,
    find_runs,
    joined_regions,
    read_runs,
    trained_region,
)


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
    assert "output" not in frame  # paths have no effect on results
    (selected,) = frame[frame.selected & frame.finished].itertuples()
    record = training_domain_validation(records)
    assert selected.step == record.step
    assert [selected.env0_in_acc, selected.env1_in_acc, selected.env2_in_acc] == list(record.in_acc)
    assert selected.env2_out_acc == record.out_acc[2]
    assert selected.validation_acc == (record.out_acc[0] + record.out_acc[2]) / 2
    assert (selected.ood_worst_accuracy, selected.loss) == (0.125, 1.0)
    assert selected.test_acc == headline_score(record) == scores["accuracy"]  # as in summary.csv
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
    with pytest.raises(RecordError, match=r"^.*results\.jsonl: "):
        read_runs(tmp_path)


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_folder_without_runs_is_an_error(name, tmp_path):
    with pytest.raises(RecordError, match=r"^folder='"):
        read_runs(tmp_path / name)


@pytest.mark.parametrize(("second", "names"), [("ab", ["a", "b"]), ("xy", ["domain 0", "domain 1"])])
def test_domains_of_a_folder_have_the_names_that_its_runs_agree_on(second, names):
    records = [invented_records([0], num_domains=2, domains=list(domains))[0] for domains in ("ab", second)]
    assert domain_names(records) == names
    assert domain_names(invented_records([0], dataset="colored_digits")) == ["+90%", "+80%", "-90%"]


GMOE = {"model": "gmoe_small_patch16"}
COMMON = {"steps": 5001, "model_kwargs": {"depth": 4}, "output": "a", "seed": 7}
GIVEN = {"lr": 0.5, "batch_size": 8, "data": "ab12", "filled_in": ["batch_size"]}
RATE = {"lr": 5e-5, **GMOE}
ROWS = [  # options of runs, and their rows
    (
        [
            COMMON,
            {**COMMON, "output": "b", "seed": 8},
            {**COMMON, "steps": 15_001},
            {**COMMON, "model_kwargs": {"depth": 4, "router": "linear"}},
            {**COMMON, "averaging": "swad"},
            {**COMMON, "hparams": {"penalty": 2}},
        ],
        [
            *("ERM, vit, steps=5001", "ERM, vit, steps=5001", "ERM, vit, steps=15001"),
            *("ERM, vit, router=linear, steps=5001", "ERM + swad, vit", "ERM, vit, penalty=2, steps=5001"),
        ],
    ),
    # Other data, and a value that another run gives by hand
    (
        [{"data": "ab12"}, {"data": "cd34"}, {**GIVEN, "filled_in": ["lr", "batch_size"]}, GIVEN],
        ["ERM, vit, data=ab12", "ERM, vit, data=cd34", *["ERM, vit, data=ab12, lr=0.5"] * 2],
    ),
    # The smallest training domain differs between held-out domains, and so do the steps of an epoch
    (
        [{"epochs": epochs, "steps": int(epochs * 15) + domain} for epochs in (2.0, 3.0) for domain in range(2)],
        ["ERM, vit, epochs=2.0"] * 2 + ["ERM, vit, epochs=3.0"] * 2,
    ),
    # A rate given by hand, beside rates that are drawn
    (
        [{**RATE, "hparams_seed": draw, "filled_in": names} for names in ([], ["lr"]) for draw in range(2)],
        ["ERM, gmoe_small_patch16, lr=5e-05"] * 2 + ["ERM, gmoe_small_patch16"] * 2,
    ),
    # Processes, where a method or a network compares images: covariances, experts' shares, batch statistics
    *(
        ([{**run, "processes": number} for number in (2, 4)], [row] * 2)
        for run, row in (
            ({"algorithm": "GroupDRO", "model": "deit_tiny_patch16_224"}, "GroupDRO, deit_tiny_patch16_224"),
            ({"model": "resnet18", "freeze_bn": True}, "ERM, resnet18"),
        )
    ),
    *(
        ([run, {**run, "processes": 2}], [row, f"{row}, processes=2"])
        for run, row in (
            ({"algorithm": "CORAL", "model": "deit_tiny_patch16_224"}, "CORAL, deit_tiny_patch16_224"),
            ({"algorithm": "own:Method", "model": "deit_tiny_patch16_224"}, "own:Method, deit_tiny_patch16_224"),
            (GMOE, "ERM, gmoe_small_patch16"),
            ({"model": "resnet18"}, "ERM, resnet18"),
        )
    ),
    # Runs of one seed from other weights
    (
        [{"weights_sha256": digest, "test": [0], "trial_seed": seed} for digest in "ab" for seed in range(2)],
        [f"ERM, vit, weights_sha256={digest}" for digest in "aabb"],
    ),
]
SPELLED = [  # settings of one effect
    ({"hparams": {"mixup_alpha": 1}}, {"hparams": {"mixup_alpha": 1.0}}),
    ({"hparams": '{"mixup_alpha": 1}'}, {"hparams": {"mixup_alpha": 1.0}}),  # DomainBed's form
    ({"model_kwargs": {"num_experts": 4}}, {"model_kwargs": {"num_experts": 4.0}}),
    ({"model_kwargs": {"moe_layers": [2, 3]}}, {"model_kwargs": {"moe_layers": (2, 3)}}),
    ({"model_kwargs": {"moe_layers": [8, 10]}}, {"model_kwargs": {"moe_layers": "last_two"}}),
    ({"class_balanced": True}, {"class_balanced": 1}),
    ({"router": "linear", "model_kwargs": {}}, {"model_kwargs": {"router": "linear"}, "router": None}),
    ({"router": "cosine"}, {}),
    ({"model_kwargs": {"num_experts": 6}}, {}),  # a default that is spelled out
    ({"lr": 5e-5, "filled_in": []}, {"lr": 5e-5, "filled_in": ["lr"]}),
    ({"num_classes": 7, "filled_in": []}, {"num_classes": 7, "filled_in": ["num_classes"]}),
    ({"label_smoothing": 0.0}, {}),
    ({"domains": ["a", "b", "c"]}, {"domains": ["A", "b", "c"]}),  # `data` tells other data
    ({"initial_checkpoint": "a.pt", "weights_sha256": "1"}, {"initial_checkpoint": "./b.pt", "weights_sha256": "1"}),
    ({"weights_sha256": "1"}, {"weights_sha256": "2"}),  # one start for each trial seed
    ({"epochs": 2.0, "steps": 37}, {"epochs": 2, "steps": 41}),
]
ROWS += [([{**GMOE, **options} for options in pair], ["ERM, gmoe_small_patch16"] * 2) for pair in SPELLED]


@pytest.mark.parametrize(("options", "rows"), ROWS, ids=str)
def test_runs_share_a_row_if_their_settings_have_the_same_effect(options, rows):
    seeds = [{"trial_seed": seed, **each} for seed, each in enumerate(options)]
    runs = [run_of(each.pop("test", (0,)), folder=str(number), **each) for number, each in enumerate(seeds)]
    found = {str(run.folder): str(row) for row, run in by_row(runs)[["row", "run"]].itertuples(index=False)}
    assert [found[str(run.folder)] for run in runs] == rows


def test_the_same_run_twice_is_an_error_that_names_both(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, invented_records((0,)))
    with pytest.raises(RecordError, match=r"^runs=\['.*/a', '.*/b'\]: .*test domains \[0\]"):
        by_row(find_runs([tmp_path])[0])
    assert len(find_runs([tmp_path / "a", tmp_path / "a"])[0]) == 1


NAMES = ["train Africa", "train Asia", "id Africa", "id Asia", "ood Oceania"]
AFRICA, ASIA, ALL = [1, 2, 3, 4], [0, 2, 3, 4], [2, 3, 4]


def regional(held_out, *evaluations, seed=0, **options) -> FinishedRun:
    """Evaluations are (validation accuracy, accuracy on Africa, accuracy on Asia)."""
    steps, records = range(len(evaluations)), []
    base = invented_records(held_out, at=steps, num_domains=5, trial_seed=seed, domains=NAMES, **options)
    for record, (validation, africa, asia) in zip(base, evaluations, strict=True):
        scores = {"accuracy": (30 * africa + 10 * asia) / 40, "worst_accuracy": min(africa, asia), "f1_macro": 0.5}
        groups = {"group_accuracy": {"Africa": africa, "Asia": asia}, "num_samples": {"Africa": 30, "Asia": 10}}
        out_acc = (validation, validation, nan, nan, nan)
        records.append(replace(record, out_acc=out_acc, roles={"id": {**scores, **groups, "worst_group": ""}}))
    return FinishedRun(Path(f"{held_out}{seed}{options}"), records)


def test_every_regions_model_is_asked_about_its_own():
    africa = regional(AFRICA, (0.25, 1.0, 0.0), (0.75, 0.5, 0.125))  # the second is selected
    asia = regional(ASIA, (0.75, 0.0, 0.25), (0.5, 0.0, 1.0))  # the first
    pooled = regional(ALL, (0.5, 0.5, 0.5))
    assert [trained_region(run) for run in (africa, asia, pooled, run_of((0, 2, 3)))] == ["Africa", "Asia", None, None]
    scores = joined_regions([africa, asia]).roles["id"]
    assert scores["group_accuracy"] == {"Africa": 0.5, "Asia": 0.25}
    assert scores["accuracy"] == (30 * 0.5 + 10 * 0.25) / 40  # of images
    assert (scores["worst_group"], scores["worst_accuracy"]) == ("Asia", 0.25)
    with pytest.raises(RecordError, match=r"^records: .*\['Asia'\]"):
        joined_regions([africa])


def test_later_images_of_every_region_are_joined_too():
    """As in FMoW, whose test under shift has all regions, and images of none, which no model answers for."""
    runs = []
    for run in (regional(AFRICA, (0.5, 1.0, 0.0)), regional(ASIA, (0.5, 0.0, 0.25))):
        scores = run.records[0].roles["id"]
        halved = {region: value / 2 for region, value in scores["group_accuracy"].items()} | {"Other": 1.0}
        shifted = {**scores, "group_accuracy": halved, "num_samples": {"Africa": 10, "Asia": 30, "Other": 5}}
        runs.append(FinishedRun(run.folder, [replace(run.records[0], roles={"id": scores, "ood": shifted})]))
    roles = joined_regions(runs).roles
    assert roles["id"]["group_accuracy"] == {"Africa": 1.0, "Asia": 0.25}
    assert roles["ood"]["group_accuracy"] == {"Africa": 0.5, "Asia": 0.125}
    assert roles["ood"]["accuracy"] == (10 * 0.5 + 30 * 0.125) / 40
