"""A calibrated network in evaluate, predict and export: temperature, status and sets of real images."""

import csv
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from crepes.base import ConformalClassifier
from PIL import Image

import timm_moe_dg
from tests.load_tool import load_tool
from tests.networks.test_calibration import scored, scores
from tests.saved_run import saved_run
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.inference.predictor import PartOptions, prediction_sets, thresholds
from timm_moe_dg.networks.calibration import CALIBRATION, load_calibration
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.run_folder import save_calibration

DATA = ["--dataset", "rotated_digits", "--test-domains", "rot_75", "--workers", "0", "--batch-size", "500"]
QUICK = ["--workers", "0"]


def rows(path):
    return list(csv.DictReader(path.open()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A network that was calibrated and evaluated, and images."""
    folder = tmp_path_factory.mktemp("calibrated")
    saved_run(folder, "gmoe_tiny_patch16", CLASSES)
    words = ["--model", str(folder / "best"), *DATA]
    load_tool("evaluate").main([*words, "--output", str(folder / "before")])
    load_tool("evaluate").main([*words, "--calibrate", "--output", str(folder / "after")])
    (folder / "images").mkdir()
    digits = get_benchmark("rotated_digits").read(None)[0]
    for index in range(5):
        digits.image(index).convert("RGB").save(folder / "images" / f"{index}.png")
    Image.new("RGB", digits.image(0).size).save(folder / "images" / "black.png")
    (folder / "images" / "cut.png").write_bytes((folder / "images" / "0.png").read_bytes()[:70])
    return folder


def test_evaluate_shows_errors_before_and_after_with_the_same_answers(folder):
    before, after = (pd.read_csv(folder / name / "per_domain.csv") for name in ("before", "after"))
    assert before.ece.tolist() == before.ece_uncalibrated.tolist() == after.ece_uncalibrated.tolist()
    assert after.accuracy.tolist() == before.accuracy.tolist()
    trained = after[after.role == "train"]
    assert trained.ece.mean() < trained.ece_uncalibrated.mean()
    assert (folder / "after" / "reliability.png").read_bytes()[:4] == b"\x89PNG"
    # The distributions of all classes are those of the logits divided by the temperature
    temperature = load_calibration(f"local-dir:{folder / 'best'}").temperature
    assert temperature != 1
    names = [f"P({name})" for name in CLASSES]
    plain, scaled = (pd.read_csv(folder / name / "predictions.csv")[names].to_numpy() for name in ("before", "after"))
    expected = plain ** (1 / temperature)
    np.testing.assert_allclose(scaled, expected / expected.sum(1, keepdims=True), atol=1e-3)


def test_every_image_has_a_status_and_certain_answers(folder, tmp_path, caplog):
    words = ["--model", str(folder / "best"), str(folder / "images"), *QUICK, "--coverage", "0.9", "--abstain", "0.2"]
    load_tool("predict").main([*words, "--output", str(tmp_path / "p.csv"), "--columns", "logits"])
    table = rows(tmp_path / "p.csv")
    assert [row["status"] for row in table] == [*["ok"] * 5, "unlike", "unreadable"]
    calibration = load_calibration(f"local-dir:{folder / 'best'}")
    least = sorted(calibration.validation.of_target.tolist(), reverse=True)[int(np.ceil(299 * 0.9)) - 1]
    for row in table[:-1]:
        probabilities = (torch.tensor(json.loads(row["logits"])) / calibration.temperature).softmax(0)
        assert float(row["probability"]) == pytest.approx(probabilities.max().item(), abs=1e-5)
        expected = {CLASSES[index] for index, value in enumerate(probabilities.tolist()) if value >= least}
        assert {*row["set"].split("|")} == expected
    assert table[-1]["set"] == table[-1]["abstain"] == ""
    load_tool("predict").main([*words, "--output", str(tmp_path / "parts")])
    parts = pd.read_parquet(tmp_path / "parts")
    assert ["|".join(names) for names in parts["set"][:-1]] == [row["set"] for row in table[:-1]]
    assert [str(value) for value in parts.abstain[:-1]] == [row["abstain"] for row in table[:-1]]
    with pytest.raises(SystemExit, match="holds the parts of another job, whose certainty"):
        load_tool("predict").main([*words, "--coverage", "0.8", "--output", str(tmp_path / "parts")])


def test_a_calibration_of_other_weights_is_left_out(folder, tmp_path, caplog):
    shutil.copytree(folder / "best", tmp_path / "best")
    torch.manual_seed(1)
    saved_run(tmp_path / "other", "gmoe_tiny_patch16", CLASSES)
    shutil.copy(tmp_path / "other" / "best" / "model.safetensors", tmp_path / "best")
    words = ["--model", str(tmp_path / "best"), str(folder / "images"), *QUICK, "--output", str(tmp_path / "p.csv")]
    load_tool("predict").main(words)
    assert "its calibration is of other weights or settings" in caplog.text
    assert {row["status"] for row in rows(tmp_path / "p.csv")} == {"ok", "unreadable"}
    with pytest.raises(SystemExit, match=r"is not calibrated: .*evaluate.* --calibrate"):
        load_tool("predict").main([*words, "--force", "--coverage", "0.9"])


def test_the_recipe_of_a_program_has_the_temperature(folder, tmp_path):
    words = ["--model", str(folder / "best"), "--formats", "pt2", "--rounds", "1", "--batch-size", "1"]
    load_tool("export").main([*words, "--output", str(tmp_path)])
    recipe = json.loads((tmp_path / "preprocessing.json").read_text())
    assert recipe["temperature"] == load_calibration(f"local-dir:{folder / 'best'}").temperature
    assert recipe["probabilities"] == "softmax(logits / temperature)"


def test_options_of_another_network_are_refused(folder):
    with pytest.raises(SystemExit, match="img_size=64: changes the model that --calibrate stores with"):
        load_tool("evaluate").main(["--model", str(folder / "best"), *DATA, "--calibrate", "--img-size", "64"])


@pytest.mark.parametrize(("option", "value", "own"), [("trial_seed", 3, 1), ("holdout_fraction", 0.5, 0.3)])
def test_images_that_the_run_trained_on_do_not_calibrate_it(option, value, own, tmp_path):
    args = {"dataset": "rotated_digits", "data_dir": None, "test_domains": [5], "trial_seed": 1}
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES, {**args, "holdout_fraction": 0.3})
    message = f"{option}={value}: is {own} in the run, which trained on images that would validate; leave it out"
    with pytest.raises(timm_moe_dg.errors.ArgumentError, match=message):
        timm_moe_dg.evaluate(tmp_path / "best", calibrate=True, workers=0, **{option: value})
    assert not (tmp_path / "best" / CALIBRATION).exists()


def test_a_held_out_domain_that_is_not_named_is_no_training_domain(tmp_path):
    args = {"dataset": "rotated_digits", "data_dir": None, "test_domains": [1, 5], "trial_seed": 1}
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES, args)
    scores = timm_moe_dg.evaluate(tmp_path / "best", test_domains=["rot_75"], calibrate=True, workers=0)
    calibration = load_calibration(f"local-dir:{tmp_path / 'best'}")
    assert calibration.held_out_domains == scores.domain[scores.test == 1].tolist() == ["rot_15", "rot_75"]
    assert len(calibration.validation.confidence) == (scores.images[scores.role == "train"] // 5).sum()


def test_places_decide_the_status_of_a_mixture_with_a_shared_expert(tmp_path):
    saved_run(tmp_path, "moge_tiny", CLASSES)
    network = load_trained(f"local-dir:{tmp_path / 'best'}")
    network.set_coverage(torch.tensor([[10.0, 50.0]]))
    network.set_coverage_radius(100.0)
    Image.effect_noise((20, 30), 80).save(tmp_path / "a.png")
    lines = ["path,lon,lat", "a.png,10,50", "a.png,-60,0", "a.png,nan,nan"]
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    table = timm_moe_dg.predict(network, tmp_path / "list.csv", workers=0)
    assert table.status.tolist() == ["ok", "outside_coverage", "shared_expert"]
    assert not (tmp_path / "best" / CALIBRATION).exists()


def options(**given):
    return PartOptions(model="local-dir:RUN/best", **given)


@pytest.mark.parametrize(("count", "coverage"), [(10, 0.7), (98, 0.9), (100, 0.9), (250, 0.835)])
def test_sets_are_those_of_crepes(count, coverage):
    # Of sizes for which (n + 1) coverage is not whole, where a rounded comparison would decide
    random = np.random.default_rng(count)
    of_target, probabilities = random.random(count), random.dirichlet([1] * 3, 200)
    library = ConformalClassifier().fit(1 - of_target)
    expected = library.predict_set(1 - probabilities, confidence=coverage, smoothing=False)
    least, _ = thresholds(options(coverage=coverage), scored(scores(*of_target.tolist())))
    rows = prediction_sets(torch.tensor(probabilities).float(), least, "abc")
    assert [sorted(row) for row in rows] == [
        [name for name, inside in zip("abc", row, strict=True) if inside] for row in expected
    ]


def test_sets_have_the_best_class_first_and_may_be_empty():
    probabilities = torch.tensor([[0.3, 0.6, 0.1], [0.45, 0.1, 0.45], [0.3, 0.3, 0.4]])
    assert prediction_sets(probabilities, 0.4, "abc") == [["b"], ["a", "c"], ["c"]]
    assert prediction_sets(probabilities, 0.5, "abc") == [["b"], [], []]


def test_thresholds_are_those_of_validation_or_of_a_sweep_and_none_without_a_calibration(tmp_path):
    own = scored(scores(0.2, 0.4, 0.6))
    assert thresholds(options(), None) == (0.0, 0.0)
    assert thresholds(options(coverage=0.5, abstain=0.9), own) == pytest.approx((0.4, 0.6))
    (tmp_path / "best").mkdir()
    save_calibration(scored(scores(0.9), scores(0.1, 0.3, 0.5)), tmp_path / "best")
    assert thresholds(options(coverage=0.7, calibration=str(tmp_path)), own) == (pytest.approx(0.1), 0.0)
    for given in ({"coverage": 0.9}, {"abstain": 0.2}):
        with pytest.raises(ArgumentError, match=r"RUN/best is not calibrated: .*evaluate.* --model RUN --calibrate"):
            thresholds(options(**given), None)
    with pytest.raises(ArgumentError, match="calibration='x': has no effect alone"):
        thresholds(options(calibration="x"), own)
