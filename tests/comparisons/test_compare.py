"""tools/compare.py with runs of tiny networks in this process."""

import json
import logging
import shutil
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from tests.invented import ARGS, make_record
from tests.load_tool import load_tool, run_tool
from timm_moe_dg.comparisons import compare as comparison
from timm_moe_dg.comparisons import sweep as sweeps
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.results.runs import FinishedRun

TINY = ["--model-kwargs", "depth=2", "embed_dim=24", "num_heads=2", "patch_size=8"]
SHORT = ["--img-size", "16", "--steps", "2", "--eval-freq", "1", "--batch-size", "2", "--workers", "0", *TINY]
SCRATCH = ["--source", "vit_tiny_patch16_224", "--from-scratch", "--trial-seeds", "4"]


@pytest.fixture
def photos(tmp_path):
    """Three sites with two classes of eight images, of which "dark" is brighter at the third site."""
    random = np.random.default_rng(0)
    for site, image in ((site, image) for site in "abc" for image in range(16)):
        folder = tmp_path / "photos" / site / ("dark" if image % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 60, (16, 16, 3)) + (0 if image % 2 else 150)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{image}.png")
    return tmp_path / "photos"


@pytest.fixture
def compare(tmp_path, photos, monkeypatch, capsys):
    """Runs the tool, with runs in this process, and returns what it printed."""
    finetune, tool = load_tool("finetune"), load_tool("compare")
    begun = []

    def run_here(jobs, environments):
        for job in jobs:
            begun.append(job.name)
            finetune.main(job.command[2:])
        return []

    monkeypatch.setattr(sweeps, "run_locally", run_here)
    monkeypatch.setattr(comparison.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setitem(comparison.PROBE, "steps", 3)
    monkeypatch.setattr(sweeps.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging.getLogger("timm_moe_dg"), "level", logging.ERROR)

    def run(*words, passed=SHORT, data=photos):
        begun.clear()
        tool.main(["--data-dir", str(data), "--output", str(tmp_path / "out"), *SCRATCH, *words, "--", *passed])
        return capsys.readouterr().out

    run.begun, run.folder = begun, tmp_path / "out"
    return run


def test_a_comparison_is_planned_run_and_answered_once(compare, tmp_path):
    planned = compare("--dry-run")
    assert "3 sets of test domains x 1 trial seed x 1 hparams seed x 2 rows = 6 runs" in planned
    assert "about " in planned
    assert not compare.folder.exists()
    answered = json.loads(compare("--format", "json", "--plot", str(tmp_path / "differences.png")))
    assert [row["name"] for row in answered["rows"]] == ["most_frequent", "dense", "gmoe"]
    assert all(set(row["accuracy"]) == {"a", "b", "c"} for row in answered["rows"])
    frequent, dense, gmoe = answered["rows"]
    assert (frequent["mean"], frequent["gmacs"], frequent["parameters"]) == (50, 0, 0)
    assert 0 < dense["gmacs"] < gmoe["gmacs"] or dense["parameters"] < gmoe["parameters"]
    assert (answered["plan"]["runs"], answered["plan"]["domains"]) == (9, ["a", "b", "c"])
    records = {path.parent.name: read_records(path) for path in compare.folder.glob("*/results.jsonl")}
    assert len(records) == 9
    # The same images, in the same order, for all rows of a seed
    kinds = {name.split("-")[1]: records[name][0].args for name in records if name.endswith("test1-trial4-hparams0")}
    assert len({args["seed"] for args in (kinds["dense"], kinds["gmoe"])}) == 1
    assert len({(json.dumps(args["split_sizes"]), args["data"]) for args in kinds.values()}) == 1
    assert {args["row"] for args in kinds.values()} == {"most_frequent", "dense", "gmoe"}
    assert (tmp_path / "differences.png").stat().st_size > 1000
    assert len(compare.begun) == 6
    assert "6 finished" in compare("--format", "json", "--status")
    again = compare()
    assert not compare.begun
    assert again.count(answered["verdict"][0]) == 1


def test_rows_are_chosen_or_ones_own(compare, tmp_path):
    (tmp_path / "rows.yaml").write_text("few: {model: gmoe_tiny_patch16, model_kwargs: {num_experts: 2}}")
    words = ["--rows", "most_frequent", "dense", str(tmp_path / "rows.yaml"), "--domains", "a"]
    out = compare(*words, "--rates", "0.1", "0.2")
    assert "learning rates by validation: " in out
    names = {f"{row}{rate}" for row in ("dense", "few") for rate in ("", "_lr0.1", "_lr0.2")}
    assert {name.split("-")[1] for name in compare.begun} == names
    tried = compare.folder.with_name("out-rates") / "folder-few_lr0.2-test0-trial5-hparams0"
    assert read_records(tried / "results.jsonl")[0].args["lr"] == 0.2
    assert (compare.folder / "folder-few-test0-trial4-hparams0" / "done").exists()
    again = compare(*words, "--rates", "0.2", "0.1")
    assert not compare.begun
    assert "learning rates by validation: " in again


def test_tables_are_rows_and_words_reach_every_row(compare, tmp_path):
    rows = ["dense", {"whole": {"model": "gmoe_tiny_patch16", "freeze": None}}]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"rows": rows, "domains": ["a"]}))
    passed = [*SHORT, "--algorithm", "CORAL", "--freeze", "trunk:1"]
    with pytest.raises(SystemExit, match=r"freeze='trunk:1': row 'whole' has freeze=None"):
        compare("-c", str(tmp_path / "plan.yaml"), passed=passed)
    out = compare("-c", str(tmp_path / "plan.yaml"), passed=passed[:-2])
    assert "most_frequent" in out  # from the records, without a row of its own
    paths = compare.folder.glob("*/results.jsonl")
    args = {path.parent.name.split("-")[1]: read_records(path)[0].args for path in paths}
    assert {name: part["algorithm"] for name, part in args.items()} == {"dense": "CORAL", "whole": "CORAL"}


def test_a_run_can_be_the_source_and_small_networks_have_no_trunk(compare, photos, tmp_path, capsys):
    words = ["--dataset", "folder", "--data-dir", photos, "--model", SCRATCH[1], "--output", tmp_path]
    run_tool("finetune", *words, "--experiment", "base", "--test-domains", "a", *SHORT)
    capsys.readouterr()
    source = ["--source", str(tmp_path / "base"), "--no-from-scratch", "--rows", "probe", "gmoe", "--domains", "b"]
    assert "the source was trained on b, c: scores there are too good" in compare(*source, "--dry-run")
    words = [*source, "--train", "upper", "--rates", "0.1", "--format"]
    answered = json.loads(compare(*words, "json"))
    assert [row["model"] for row in answered["plan"]["rows"].values()] == [f"local-dir:{tmp_path}/base/best", "gmoe"]
    runs = {name: compare.folder / f"folder-{name}-test1-trial4-hparams0" for name in ("probe", "gmoe")}
    args = {name: read_records(run / "results.jsonl")[0].args for name, run in runs.items()}
    assert {name: (of["steps"], of["lr"]) for name, of in args.items()} == {"probe": (3, 0.01), "gmoe": (2, 0.1)}
    (runs["gmoe"] / "best" / "model.safetensors").unlink()  # costs follow from the structure
    assert json.loads(compare(*words, "json")) == answered
    assert "probe keeps its own eval_freq, steps" in compare(*words, "text")


def test_places_alone_know_what_lies_near(compare, tmp_path, photos):
    table = [
        {"path": path.relative_to(photos), "label": path.parent.name, "group": path.parts[-3]}
        | {"lon": 10 * (path.parent.name == "dark") + index / 100, "lat": ord(path.parts[-3]) - 90}
        for index, path in enumerate(sorted(photos.rglob("*.png")))
    ]
    table[0] |= {"lon": None, "lat": None}
    pd.DataFrame(table).to_csv(photos / "metadata.csv", index=False, na_rep="nan")
    rows = ["--dataset", "place_folder", "--rows", "most_frequent", "places", "dense", "erm_le"]
    answered = json.loads(compare(*rows, "--format", "json"))
    accuracy = {row["name"]: row["accuracy"] for row in answered["rows"]}
    assert accuracy["most_frequent"] == {"a": 50, "b": 50, "c": 50}
    assert accuracy["places"]["b"] == accuracy["places"]["c"] == 100  # classes lie apart by ten degrees
    assert accuracy["places"]["a"] in (93.75, 100)  # the image without a place has the most frequent class


IMPROVING = [
    ((0.2, 0.4, 0.5), True),
    ((0.2, 0.5, 0.4), False),
    ((0.2, 0.5, 0.5), False),
    ((0, 1), False),
    ((nan, nan, nan), False),
]


@pytest.mark.parametrize(("out_acc", "is_named"), IMPROVING)
def test_rows_that_still_improve_are_named(out_acc, is_named):
    records = [
        make_record(step=step, out_acc=(value, 0.9 - value, value), args={**ARGS, "row": "long"})
        for step, value in enumerate(out_acc)
    ]
    (text,) = comparison.still_improving([FinishedRun(Path("run"), records)]) or [""]
    assert ("at the last step of most runs of long: " in text) is is_named
    averaged = [*records, replace(records[-1], averaged=True)]
    assert not comparison.still_improving([FinishedRun(Path("run"), averaged)])


@pytest.mark.parametrize(
    ("words", "passed", "complaint"),
    [
        (["--source", "resnet18"], [], "source='resnet18': is no vision transformer"),
        (["--rows", "dens"], [], "rows='dens': is no file, and none of the rows dense, gmoe"),
        (["--rows", "places", "dense"], [], "rows='places': no training image has coordinates"),
        (["-c", "places.yaml"], [], "rows='places': is the name of a row without a network"),
        (["--rows", "dense"], ["--trial-seed", "3"], "trial_seed=3: is decided by the sweep"),
        (["--data-dir", "none"], [], "data_dir='none'"),
        (["--domains", "d"], [], r"domains=\['d'\]"),
    ],
)
def test_a_mistake_ends_a_comparison_before_its_first_run(compare, monkeypatch, tmp_path, words, passed, complaint):
    monkeypatch.chdir(tmp_path)
    Path("places.yaml").write_text("rows: [{places: {}}]")
    with pytest.raises(SystemExit, match=rf"^compare\.py: \w+: {complaint}"):
        compare(*words, passed=[*SHORT, *passed])
    assert not compare.begun


def test_runs_on_other_data_are_refused(compare, photos):
    words = ["--rows", "most_frequent", "dense", "--domains", "a"]
    for _ in range(2):  # the second call looks at the finished runs
        compare(*words)
    Image.new("RGB", (16, 16)).save(photos / "b" / "dark" / "new.png")
    with pytest.raises(SystemExit, match=r"output=.*holds a run on other data"):
        compare(*words)
    assert not compare.begun


def test_a_class_of_one_site_is_named(compare, photos):
    for site in "abc":
        (photos / site / "rare").mkdir()
    Image.new("RGB", (16, 16)).save(photos / "b" / "rare" / "0.png")
    assert "only b has images of rare: a run that holds it out cannot learn them" in compare("--dry-run")


def test_each_call_counts_the_sites_anew(compare, photos):
    assert "3 sets of test domains" in compare("--rows", "dense", "--dry-run")
    shutil.copytree(photos / "a", photos / "d")
    assert "4 sets of test domains" in compare("--rows", "dense", "--dry-run")
