"""tools/evaluate.py: its numbers are those of logits computed by hand, and mistakes are named."""

import json
import os
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import confusion_matrix, f1_score

import timm_moe_dg
from tests.load_tool import read_rows, run_tool
from tests.saved_run import saved_run
from timm_moe_dg.data import (
    EvaluationImages,
    evaluation_loader,
    evaluation_transform,
    get_benchmark,
    split_domain,
    split_domains,
)
from timm_moe_dg.data.inspection import fingerprint
from timm_moe_dg.data.readers.digits import CLASSES, geo_digits, rotated_digits
from timm_moe_dg.inference.evaluated import plot_confusion, plot_reliability
from timm_moe_dg.metrics import calibration_bins
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.calibration import CALIBRATION, load_calibration
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.evaluation import domain_accuracies, predict

QUICK = ["--workers", "0", "--batch-size", "500"]
GMOE = "gmoe_tiny_patch16"


def evaluate(*words):
    run_tool("evaluate", *words, *QUICK)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the rotated digits, its network's logits of every image, and the tool's files about all domains."""
    folder = tmp_path_factory.mktemp("run")
    args = {"dataset": "rotated_digits", "data_dir": None, "test_domains": [1], "trial_seed": 3, "steps": 7}
    network = saved_run(folder, GMOE, CLASSES, {**args, "holdout_fraction": 0.3})
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        logits = [
            network((torch.tensor(np.array(domain.images))[:, None] / 255 - mean) / std).double()
            for domain in rotated_digits()
        ]
    evaluate("--model", f"local-dir:{folder / 'best'}", "--domains", "all", "--output", folder / "scores",
             "--save-features", folder / "features.npz")  # fmt: skip
    return folder, logits


def best(run):
    return f"local-dir:{run[0] / 'best'}"


def metrics_in(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_scores_are_those_of_the_logits(run):
    metrics = metrics_in(run[0] / "scores")
    accuracies = {}
    for domain, logits in zip(rotated_digits(), run[1], strict=True):
        targets, predicted = np.array(domain.targets), logits.argmax(1).numpy()
        scores = metrics["domains"][domain.name]
        accuracies[domain.name] = (predicted == targets).mean()
        assert scores["images"] == len(targets)
        assert scores["accuracy"] == pytest.approx(accuracies[domain.name])
        assert scores["f1_macro"] == pytest.approx(f1_score(targets, predicted, average="macro"))
    assert len(set(accuracies.values())) > 1
    assert metrics["average_accuracy"] == pytest.approx(np.mean(list(accuracies.values())))
    assert metrics["test_average_accuracy"] == pytest.approx(accuracies["rot_15"])
    assert metrics["worst_domains"] == [min(accuracies, key=accuracies.get)]
    assert metrics["dataset"] == "rotated_digits"
    rows = read_rows(run[0] / "scores" / "per_domain.csv")
    assert [row["domain"] for row in rows] == [domain.name for domain in rotated_digits()]
    assert [row["test"] for row in rows] == ["0", "1", "0", "0", "0", "0"]
    assert [float(row["ece"]) for row in rows] == [scores["ece"] for scores in metrics["domains"].values()]


def test_accuracies_of_both_splits_are_those_that_a_run_records(run):
    metrics, domains = metrics_in(run[0] / "scores"), rotated_digits()
    splits = split_domains(domains, [0, 2, 3, 4, 5], trial_seed=3, holdout_fraction=0.3)
    network = load_trained(best(run), img_size=32)
    config = data_config(network, 32)
    images = EvaluationImages(domains, splits, evaluation_transform((32, 32), config["mean"], config["std"]))
    predictions = predict(network, evaluation_loader(images, batch_size=500, workers=0))  # as finetune.py
    in_acc, out_acc = domain_accuracies(predictions, len(domains))
    assert [scores["in_accuracy"] for scores in metrics["domains"].values()] == list(in_acc)
    assert [scores["out_accuracy"] for scores in metrics["domains"].values()] == list(out_acc)


def test_every_image_has_its_prediction_and_its_features(run):
    rows, saved = read_rows(run[0] / "scores" / "predictions.csv"), np.load(run[0] / "features.npz")
    predicted = np.array([[float(row[f"P({name})"]) for name in CLASSES] for row in rows])
    # domains and images in the data's order
    assert np.abs(predicted - torch.cat(run[1]).softmax(1).numpy()).max() < 1e-4
    domains = rotated_digits()
    targets = np.concatenate([domain.targets for domain in domains])
    names = [domain.name for domain in domains for _ in domain.targets]
    assert [row["target"] for row in rows] == [CLASSES[target] for target in targets]
    assert [row["prediction"] for row in rows] == [CLASSES[index] for index in saved["prediction"]]
    assert [row["domain"] for row in rows] == names == list(saved["domain_names"][saved["domain"]])
    assert [row["file"] for row in rows] == list(saved["name"])
    splits = split_domains(domains, [], trial_seed=3, holdout_fraction=0.3)
    inside = [
        position in split.inside for split in splits for position in range(len(split.inside) + len(split.outside))
    ]
    assert [row["split"] == "in" for row in rows] == inside
    logits = load_trained(best(run), img_size=32).head(torch.from_numpy(saved["features"])).double()
    assert torch.allclose(logits, torch.cat(run[1]), atol=1e-4)


def test_the_held_out_domain_comes_first_and_is_what_counts(run, tmp_path, capsys, caplog):
    evaluate("--model", run[0], "--output", tmp_path)
    assert f"local-dir:{run[0]}/best: " in caplog.text
    assert " parameters from its saved weights, same classifier" in caplog.text
    assert f"{run[0]}/best': the run has not finished, and this is its best network so far" in caplog.text
    metrics = metrics_in(tmp_path)
    domain, logits = rotated_digits()[1], run[1][1]
    accuracy = (logits.argmax(1) == torch.tensor(domain.targets)).double().mean().item()
    assert metrics["counted_domains"] == ["rot_15"]
    assert metrics["overall"]["images"] == len(domain)
    assert metrics["overall"]["accuracy"] == metrics["average_accuracy"] == pytest.approx(accuracy)
    assert metrics["worst_domains"] == ["rot_15"]
    assert metrics["domains"] == metrics_in(run[0] / "scores")["domains"]
    rows = read_rows(tmp_path / "confusion.csv")
    assert [row["class"] for row in rows] == list(CLASSES)
    counts = [[int(row[name]) for name in CLASSES] for row in rows]
    assert np.array_equal(counts, confusion_matrix(domain.targets, logits.argmax(1).numpy(), labels=range(10)))
    with Image.open(tmp_path / "confusion.png") as picture:
        assert len(picture.convert("L").getcolors(256)) > 50
    out = capsys.readouterr().out
    assert f"written to {tmp_path}: confusion.csv, confusion.png, metrics.json" in out
    rows = [line.split()[:3] for line in out.splitlines() if line.startswith("rot_")]
    assert rows[0] == ["rot_15", "held", "out"]
    assert [row[1] for row in rows[1:]] == ["train"] * 5
    caplog.clear()
    (run[0] / "done").touch()
    evaluate("--model", run[0])
    assert "the run has not finished" not in caplog.text


@pytest.mark.slow
def test_domains_by_name_and_a_split_of_another_seed(run, tmp_path):
    words = ["--domains", "rot_60", "rot_0", "--split", "out", "--trial-seed", "0", "--holdout-fraction", "0.5"]
    evaluate("--model", best(run), *words, "--output", tmp_path)
    metrics, correct = metrics_in(tmp_path), {}
    for position, (domain, logits) in enumerate(zip(rotated_digits(), run[1], strict=True)):
        chosen = split_domain(len(domain), position, trial_seed=0, holdout_fraction=0.5).outside
        correct[domain.name] = logits.argmax(1).numpy()[chosen] == np.array(domain.targets)[chosen]
        assert metrics["domains"][domain.name]["images"] == len(chosen)
        assert metrics["domains"][domain.name]["accuracy"] == pytest.approx(correct[domain.name].mean())
    both = np.concatenate([correct["rot_0"], correct["rot_60"]])
    assert (metrics["overall"]["images"], metrics["overall"]["accuracy"]) == (len(both), pytest.approx(both.mean()))
    assert metrics["worst_domains"] == [min(("rot_0", "rot_60"), key=lambda name: correct[name].mean())]


@pytest.mark.slow
def test_classes_in_another_order_are_matched_by_name(run, tmp_path, capsys):
    shutil.copytree(run[0] / "best", tmp_path / "best")
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    config["label_names"] = [CLASSES[index] for index in order]
    del config["weights_sha256"]
    (tmp_path / "best" / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "best" / "model.safetensors")
    weights |= {key: weights[key][order].contiguous() for key in ("head.weight", "head.bias")}
    save_file(weights, tmp_path / "best" / "model.safetensors")
    model = ["--model", f"local-dir:{tmp_path / 'best'}", "--dataset", "rotated_digits"]
    evaluate(*model, "--output", tmp_path / "scores")
    found, expected = ((folder / "scores" / "confusion.csv").read_text() for folder in (tmp_path, run[0]))
    assert found == expected
    assert "average of test domains" not in capsys.readouterr().out  # no run beside it, and nobody said which


@pytest.mark.slow
def test_metadata_and_roles_of_a_place_benchmark(tmp_path, capsys):
    classes = geo_digits()[0].classes
    run = {"dataset": "geo_digits", "test_domains": [5, 6, 7, 8, 9, 10]}
    network = saved_run(tmp_path, "moge_tiny", classes, run)
    domain = next(domain for domain in geo_digits() if domain.name == "id Asia")
    pixels = torch.tensor(np.array(domain.images)[domain.split.inside])[:, None] / 255
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    places, targets = torch.tensor(domain.metadata), torch.tensor(domain.targets)
    with torch.no_grad():
        predicted = network((pixels - mean) / std, places).argmax(1)
        assert not torch.equal(predicted, network((pixels - mean) / std).argmax(1))
    evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--output", tmp_path / "scores")
    groups = metrics_in(tmp_path / "scores")["roles"]["id"]
    assert groups["group_accuracy"]["Asia"] == pytest.approx((predicted == targets).double().mean().item(), abs=1e-9)
    accuracies = groups["group_accuracy"]
    assert groups["worst_group"] == min(accuracies, key=accuracies.get)
    assert f"worst group {min(accuracies.values()):.4f}" in capsys.readouterr().out


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """A run on folders of digits, art, photo (held out) and sketch, with the fingerprint of its data."""
    root = tmp_path_factory.mktemp("placed")
    for name, domain in zip(("art", "photo", "sketch"), rotated_digits(), strict=False):
        for index in range(20):
            folder = root / "data" / name / CLASSES[domain.targets[index]]
            folder.mkdir(parents=True, exist_ok=True)
            domain.image(index).save(folder / f"{index:02d}.png")
        for label in CLASSES:
            (root / "data" / name / label).mkdir(exist_ok=True)
    domains = get_benchmark("folder").read(root / "data")
    args = {"dataset": "folder", "data_dir": str(root / "data"), "test_domains": [1], "trial_seed": 3}
    saved_run(root, GMOE, CLASSES, {**args, "holdout_fraction": 0.2, "domain_digests": fingerprint(domains)})
    return root, domains


def roles_in(folder):
    return {name: scores["role"] for name, scores in metrics_in(folder)["domains"].items()}


def test_on_other_data_no_domain_is_taken_for_one_of_the_run_and_all_count(placed, tmp_path, capsys):
    for before, after in (("art", "north"), ("photo", "south"), ("sketch", "west")):
        shutil.copytree(placed[0] / "data" / before, tmp_path / "data" / after)
        broken = next((tmp_path / "data" / after).rglob("*.png"))
        Image.new("RGB", (40, 40)).save(broken)
    evaluate("--model", best(placed), "--data-dir", tmp_path / "data", "--output", tmp_path / "scores")
    assert roles_in(tmp_path / "scores") == dict.fromkeys(("north", "south", "west"), "new")
    assert metrics_in(tmp_path / "scores")["overall"]["images"] == 60
    out = capsys.readouterr().out
    assert "together (all domains): 60 images" in out
    answers = pd.read_csv(tmp_path / "scores" / "confusion.csv", index_col="class").sum()
    assert f"most frequent answer: {answers.idxmax()!r}, {answers.max()} of 60 images" in out


def test_images_without_metadata_are_counted(placed, tmp_path, caplog):
    # Columns of the run's own table are none of a folder
    args = {"dataset": "place_folder", "columns": {"label": "species"}, "metadata_columns": ["year"]}
    saved_run(tmp_path, "moge_tiny", CLASSES, {**args, "test_domains": [], "trial_seed": 0})
    evaluate("--model", tmp_path / "best", "--dataset", "folder", "--data-dir", placed[0] / "data")
    assert "without metadata: 60 of 60 images, which go to the shared expert" in caplog.text


def test_a_renamed_domain_keeps_its_role_and_every_domain_its_split_wherever_it_stands(placed, tmp_path):
    root, domains = placed
    for before, after in (("art", "zebra"), ("photo", "photo"), ("sketch", "sketch")):
        shutil.copytree(root / "data" / before, tmp_path / "data" / after)
    words = ["--model", best(placed), "--data-dir", tmp_path / "data", "--output", tmp_path / "scores"]
    evaluate(*words)
    assert roles_in(tmp_path / "scores") == {"photo": "held out", "sketch": "train", "zebra": "train"}
    assert metrics_in(tmp_path / "scores")["counted_domains"] == ["photo"]
    rows = read_rows(tmp_path / "scores" / "predictions.csv")
    for position, name in ((0, "zebra"), (2, "sketch")):
        outside = split_domain(20, position, trial_seed=3).outside
        expected = {os.path.basename(domains[position].file(index)) for index in outside}
        own = [row for row in rows if (row["domain"], row["split"]) == (name, "out")]
        assert {os.path.basename(row["file"]) for row in own} == expected
    Image.new("RGB", (40, 40)).save(next((tmp_path / "data" / "sketch").rglob("*.png")))
    evaluate(*words, "--force")
    assert roles_in(tmp_path / "scores")["sketch"] == "train, changed"
    assert metrics_in(tmp_path / "scores")["counted_domains"] == ["photo"]
    assert metrics_in(tmp_path / "scores")["domains"]["sketch"]["out_accuracy"] is None


def test_new_domains_leave_the_runs_split_by_groups_and_lose_images_of_its_groups(tmp_path, caplog, monkeypatch):
    """Groups 00 to 19 are in art, 20 to 39 in photo, which is held out, and 10 to 29 in a new site."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures take most of the time
    digits = rotated_digits()[0]
    for name, first in (("art", 0), ("photo", 20), ("site", 10)):
        place = tmp_path / ("new" if name == "site" else "data") / name
        for index in range(first, first + 20):
            (place / str(index % 2)).mkdir(parents=True, exist_ok=True)
            digits.image(index).save(place / str(index % 2) / f"{index:02d}.png")
    args = {"dataset": "folder", "data_dir": str(tmp_path / "data"), "test_domains": [1], "trial_seed": 3}
    args |= {"group_column": r"(\d\d)\.png"}
    digests = fingerprint(get_benchmark("folder").read(args["data_dir"]))
    saved_run(tmp_path, GMOE, ("0", "1"), {**args, "domain_digests": digests})
    evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--output", tmp_path / "before")
    shutil.move(tmp_path / "new" / "site", tmp_path / "data")
    evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--output", tmp_path / "after")
    before, after = (read_rows(tmp_path / name / "predictions.csv") for name in ("before", "after"))
    assert [row for row in after if row["domain"] != "site"] == before
    assert {row["file"][-6:-4] for row in after if row["domain"] == "site"} == {str(group) for group in range(20, 30)}
    assert "10 of 20 images of the new domain 'site' are of groups that the run trained on" in caplog.text
    (tmp_path / "data" / "photo" / "0" / "20.png").rename(tmp_path / "data" / "photo" / "0" / "10.png")
    for output in ("changed", "without"):  # photo may have had other groups in common with art
        evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--output", tmp_path / output)
        rows = read_rows(tmp_path / output / "predictions.csv")
        assert {row["split"] for row in rows if row["domain"] == "art"} == {"in"}
        shutil.rmtree(tmp_path / "data" / "photo", ignore_errors=True)


def test_evaluate_shows_errors_before_and_after_with_the_same_answers(calibrated):
    before, after = (pd.read_csv(calibrated / name / "per_domain.csv") for name in ("before", "after"))
    assert before.ece.tolist() == before.ece_uncalibrated.tolist() == after.ece_uncalibrated.tolist()
    assert after.accuracy.tolist() == before.accuracy.tolist()
    trained = after[after.role == "train"]
    assert trained.ece.mean() < trained.ece_uncalibrated.mean()
    assert (calibrated / "after" / "reliability.png").read_bytes()[:4] == b"\x89PNG"
    # The distributions of all classes are those of the logits divided by the temperature
    temperature = load_calibration(f"local-dir:{calibrated / 'best'}").temperature
    assert temperature != 1
    names = [f"P({name})" for name in CLASSES]
    plain, scaled = (
        pd.read_csv(calibrated / name / "predictions.csv")[names].to_numpy() for name in ("before", "after")
    )
    expected = plain ** (1 / temperature)
    np.testing.assert_allclose(scaled, expected / expected.sum(1, keepdims=True), atol=1e-3)


def test_a_held_out_domain_that_is_not_named_is_no_training_domain(tmp_path):
    args = {"dataset": "rotated_digits", "data_dir": None, "test_domains": [1, 5], "trial_seed": 1}
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES, args)
    scores = timm_moe_dg.evaluate(tmp_path / "best", test_domains=["rot_75"], calibrate=True, workers=0)
    calibration = load_calibration(f"local-dir:{tmp_path / 'best'}")
    assert calibration.held_out_domains == scores.domain[scores.test == 1].tolist() == ["rot_15", "rot_75"]
    assert len(calibration.validation.confidence) == (scores.images[scores.role == "train"] // 5).sum()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--test-domains", "6"], "ProtocolError: test_domains="),
        (["--domains", "sketch", "rot_0"], "ProtocolError: domains="),
        (["--save-features", "seen.csv"], "ArgumentError: save_features="),
        (["--dataset", "folder"], "DataError: data_dir="),
        (["--expert-mode", "shared"], "ArgumentError: expert_mode="),
        (["--calibrate", "--img-size", "64"], "ArgumentError: img_size=64: changes the model"),
        (["--calibrate", "--trial-seed", "5"], "ArgumentError: trial_seed=5: is 3 in the run"),
        (["--model", "{placed}", "--test-domains", "photo", "art"], r"ArgumentError: test_domains=\['art'\]"),
        (["--model", GMOE, "--dataset", "rotated_digits"], "ArgumentError: model="),
        (["--model", "{named}", "--dataset", "rotated_digits"], "ArgumentError: classes='10: 0, 1, 2"),
        (["--model", "{unnamed}", "--dataset", "rotated_digits"], "the checkpoint's are 2 without names"),
    ],
)
def test_a_mistake_is_named(run, placed, tmp_path, words, message):
    places = {"placed": placed[0] / "best", "named": tmp_path / "best", "unnamed": tmp_path / "unnamed"}
    saved_run(tmp_path, GMOE, ("cat", "dog"))
    shutil.copytree(places["named"], places["unnamed"])
    config = json.loads((places["named"] / "config.json").read_text())
    (places["unnamed"] / "config.json").write_text(json.dumps({**config, "label_names": None}))
    with pytest.raises(SystemExit, match=message):
        evaluate("--model", best(run), *(word.format(**places) for word in words))
    assert not (run[0] / "best" / CALIBRATION).exists()


def test_a_folder_of_images_with_one_that_cannot_be_decoded(run, placed, tmp_path):
    shutil.copytree(placed[0] / "data", tmp_path / "data")
    broken = next((tmp_path / "data" / "art").glob("*/07.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    words = ["--model", best(run), "--dataset", "folder", "--data-dir", tmp_path / "data"]
    with pytest.raises(SystemExit, match=r"evaluate.py: ImageReadError: image='.*07.png': cannot be decoded"):
        evaluate(*words)
    evaluate(*words, "--skip-unreadable", "--output", tmp_path / "scores")
    domains = json.loads((tmp_path / "scores" / "metrics.json").read_text())["domains"]
    assert {name: scores["images"] for name, scores in domains.items()} == {"art": 19, "photo": 20, "sketch": 20}
    for (name, scores), logits, digits in zip(domains.items(), run[1], rotated_digits(), strict=False):
        right = (logits[:20].argmax(1) == torch.tensor(digits.targets[:20])).tolist()
        right = [value for index, value in enumerate(right) if name != "art" or index != 7]
        assert scores["accuracy"] == pytest.approx(np.mean(right))


def test_results_are_not_overwritten_unless_asked_for_and_need_no_matplotlib(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were missing
    words = ["--model", best(run), "--output", tmp_path, "--split", "out"]
    (tmp_path / "confusion.csv").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"output=.*holds confusion.csv already.*--force"):
        evaluate(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["confusion.csv", "notes.txt"]
    with pytest.raises(SystemExit, match=r"output=.*features.npz already"):
        evaluate("--model", best(run), "--save-features", run[0] / "features.npz")
    evaluate(*words, "--force")
    assert (tmp_path / "confusion.csv").read_text() != "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    written = {path.name for path in tmp_path.iterdir()} - {"notes.txt"}
    assert written == {"metrics.json", "per_domain.csv", "confusion.csv", "predictions.csv"}
    for name in ("confusion.png", "reliability.png"):
        assert f"{name} is not drawn: drawing needs matplotlib" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 10, 31])
@pytest.mark.parametrize("name", ["{}", "a class with a long name, number {} $x_{{"])
def test_no_label_is_cut_off(tmp_path, number, name):
    classes = [name.format(index) for index in range(number)]
    title = "model\nheld out: " + "a domain " * 20
    plot_confusion(torch.eye(number, dtype=torch.long), classes, tmp_path / "a.png", title)
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


@pytest.mark.parametrize("number", [0, 1, 50])
def test_a_reliability_diagram_of_any_number_of_predictions(tmp_path, number):
    confidence = torch.linspace(0.3, 1, number)
    bins = calibration_bins(confidence, confidence > 0.5)
    plot_reliability({"held out": bins, "training": bins}, tmp_path / "picture.png")
    assert Image.open(tmp_path / "picture.png").width > 300
