"""tools/evaluate.py: its numbers are those of logits computed by hand, and it refuses what would not mean anything."""

import csv
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import confusion_matrix, f1_score

from tests.load_tool import load_tool
from tests.saved_run import SMALL, saved_run
from timm_moe_dg.analysis.evaluation_files import FILES
from timm_moe_dg.data import EvaluationImages, evaluation_loader, evaluation_transform, split_domain, split_domains
from timm_moe_dg.data.readers.digits import CLASSES, geo_digits, rotated_digits
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols import domain_accuracies, predict

QUICK = ["--workers", "0", "--batch-size", "500"]
GMOE = "gmoe_tiny_patch16"


def evaluate(*words):
    load_tool("evaluate").main([*map(str, words), *QUICK])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the rotated digits, what its network says about every image by hand, and the tool's files about it."""
    folder = tmp_path_factory.mktemp("run")
    args = {"dataset": "rotated_digits", "data_dir": None, "test_domains": [1], "trial_seed": 3, "steps": 7}
    network = saved_run(folder, GMOE, CLASSES, {**args, "holdout_fraction": 0.3})
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        logits = [
            network((torch.tensor(np.array(domain.images))[:, None] / 255 - mean) / std).double()
            for domain in rotated_digits()
        ]
    evaluate("--model", f"local-dir:{folder / 'best'}", "--domains", "all", "--output", folder / "scores")
    return folder, logits


def best(run):
    return f"local-dir:{run[0] / 'best'}"


def test_scores_are_those_of_the_logits(run):
    folder, logits = run
    metrics = json.loads((folder / "scores" / "metrics.json").read_text())
    accuracies = {}
    for domain, own in zip(rotated_digits(), logits, strict=True):
        targets, predicted = np.array(domain.targets), own.argmax(1).numpy()
        scores = metrics["domains"][domain.name]
        accuracies[domain.name] = (predicted == targets).mean()
        assert scores["images"] == len(targets)
        assert scores["accuracy"] == pytest.approx(accuracies[domain.name])
        assert scores["f1_macro"] == pytest.approx(f1_score(targets, predicted, average="macro"))
    assert len(set(accuracies.values())) > 1
    assert metrics["average_accuracy"] == pytest.approx(np.mean(list(accuracies.values())))
    assert metrics["test_average_accuracy"] == pytest.approx(accuracies["rot_15"])
    assert metrics["worst_domain"] == min(accuracies, key=accuracies.get)
    assert metrics["dataset"] == "rotated_digits"


def test_calibration_compares_confidence_with_accuracy(run):
    folder, logits = run
    probabilities = torch.cat(logits).softmax(1).numpy()
    targets = np.concatenate([domain.targets for domain in rotated_digits()])
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == targets
    bins = np.minimum(np.ceil(confidence * 15).astype(int) - 1, 14)
    gaps = [abs((confidence - correct)[bins == number].sum()) for number in range(15)]
    metrics = json.loads((folder / "scores" / "metrics.json").read_text())
    assert metrics["overall"]["ece"] == pytest.approx(sum(gaps) / len(targets), abs=1e-3)
    assert metrics["overall"]["ece"] > 0.01


def test_confusions_are_counted_and_drawn(run):
    folder, logits = run
    with (folder / "scores" / "confusion.csv").open() as file:
        header, *rows = csv.reader(file)
    targets = np.concatenate([domain.targets for domain in rotated_digits()])
    expected = confusion_matrix(targets, torch.cat(logits).argmax(1).numpy(), labels=range(10))
    assert header == ["class", *CLASSES]
    assert [row[0] for row in rows] == list(CLASSES)
    assert np.array_equal(np.array([row[1:] for row in rows], dtype=int), expected)
    with Image.open(folder / "scores" / "confusion.png") as picture:
        assert min(picture.size) > 500
        assert len(picture.convert("L").getcolors(256)) > 50


def test_table_of_domains(run):
    with (run[0] / "scores" / "per_domain.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["domain"] for row in rows] == [domain.name for domain in rotated_digits()]
    assert [row["test"] for row in rows] == ["0", "1", "0", "0", "0", "0"]
    metrics = json.loads((run[0] / "scores" / "metrics.json").read_text())
    assert [float(row["ece"]) for row in rows] == [scores["ece"] for scores in metrics["domains"].values()]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "other"), [("out", []), ("in", ["--trial-seed", "0", "--holdout-fraction", "0.5"])])
def test_one_part_of_each_domain_by_the_seed_of_the_run_or_another(run, tmp_path, part, other):
    evaluate("--model", best(run), "--split", part, "--output", tmp_path, *other)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    seed, fraction = (0, 0.5) if other else (3, 0.3)
    for position, (domain, logits) in enumerate(zip(rotated_digits(), run[1], strict=True)):
        split = split_domain(len(domain), position, trial_seed=seed, holdout_fraction=fraction)
        chosen = split.outside if part == "out" else split.inside
        right = logits.argmax(1).numpy()[chosen] == np.array(domain.targets)[chosen]
        assert metrics["domains"][domain.name]["images"] == len(chosen)
        assert metrics["domains"][domain.name]["accuracy"] == pytest.approx(right.mean())


@pytest.mark.slow
def test_classes_in_another_order_are_matched_by_name(run, tmp_path, capsys):
    shutil.copytree(run[0] / "best", tmp_path / "best")
    order = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7]
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    config["label_names"] = [CLASSES[index] for index in order]
    (tmp_path / "best" / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "best" / "model.safetensors")
    weights |= {key: weights[key][order].contiguous() for key in ("head.weight", "head.bias")}
    save_file(weights, tmp_path / "best" / "model.safetensors")
    model = ["--model", f"local-dir:{tmp_path / 'best'}", "--dataset", "rotated_digits"]
    evaluate(*model, "--output", tmp_path / "scores")
    found, expected = ((folder / "scores" / "confusion.csv").read_text() for folder in (tmp_path, run[0]))
    assert found == expected
    assert "average of test domains" not in capsys.readouterr().out  # no run beside it, and nobody said which


def test_weights_in_a_file_give_the_same_as_the_folder(run, tmp_path):
    words = [f"{key}={value}" for key, value in SMALL.items()]
    file = run[0] / "best" / "model.safetensors"
    evaluate("--model", GMOE, "--initial-checkpoint", file, "--dataset", "rotated_digits", "--output", tmp_path,
             "--model-kwargs", *words)  # fmt: skip
    assert (tmp_path / "confusion.csv").read_text() == (run[0] / "scores" / "confusion.csv").read_text()


def test_a_file_of_options_may_name_the_model(run, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text(f"model: {best(run)}\nsplit: in\n")
    evaluate("-c", tmp_path / "options.yaml", "--split", "out")
    assert f"{best(run)} on rotated_digits, out images of each domain" in capsys.readouterr().out


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
        routed, shared = (network((pixels - mean) / std, *one).argmax(1) for one in ((places,), ()))
    assert not torch.equal(routed, shared)
    for mode, predicted in (("routed", routed), ("shared", shared)):
        evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--expert-mode", mode, "--output", tmp_path / mode)
        roles = json.loads((tmp_path / mode / "metrics.json").read_text())["roles"]
        expected = (predicted == targets).double().mean().item()
        assert roles["id"]["group_accuracy"]["Asia"] == pytest.approx(expected, abs=1e-9)
        groups = roles["id"]["group_accuracy"]
        assert roles["id"]["worst_group"] == min(groups, key=groups.get)
        assert f"worst group {min(groups.values()):.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--test-domains", "6"], r"test_domains=\[6\]: name domains out of: 0 rot_0, 1 rot_15"),
        (["--test-domains", "sketch"], r"test_domains=\['sketch'\]: no domain is called sketch; choose from: 0 rot_0"),
        (["--domains", "sketch", "rot_0"], r"domains=\['sketch', 'rot_0'\]: no domain is called sketch; choose from"),
        (["--domains", "rot_0", "1"], r"domains=\['rot_0', 1\]: give names or positions, not both, out of: 0 rot_0"),
        (["--save-features", "seen.csv"], r"save_features='seen.csv': give a file that ends in .npz"),
        (
            ["--output", "x", "--projection", "umap"],
            r"projection='umap': needs umap-learn, which is not",
        ),
        (["--dataset", "nothing"], "dataset='nothing': choose from"),
        (["--dataset", "folder"], "data_dir=None: give --data-dir"),
        (["--expert-mode", "shared"], "expert_mode='shared': .* no metadata-routed experts"),
    ],
)
def test_a_mistake_is_named(run, words, message):
    with pytest.raises(SystemExit, match=message):
        evaluate("--model", best(run), *words)


def test_a_network_without_weights_or_with_other_classes_is_not_evaluated(run, tmp_path):
    with pytest.raises(SystemExit, match="model='gmoe_tiny_patch16': comes without weights; add --pretrained"):
        evaluate("--model", GMOE, "--dataset", "rotated_digits")
    with pytest.raises(SystemExit, match=r"dataset=None: give --dataset"):
        evaluate("--model", GMOE, "--pretrained")
    saved_run(tmp_path / "named", GMOE, ("cat", "dog"))
    with pytest.raises(SystemExit, match=r"classes='10: 0, 1, 2.*and 2 more'.*the checkpoint's are 2: cat, dog"):
        evaluate("--model", f"local-dir:{tmp_path / 'named' / 'best'}", "--dataset", "rotated_digits")
    config = tmp_path / "named" / "best" / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "label_names"}))
    with pytest.raises(SystemExit, match="the checkpoint's are 2 without names"):
        evaluate("--model", f"local-dir:{tmp_path / 'named' / 'best'}", "--dataset", "rotated_digits")


def test_a_folder_of_images_with_one_that_cannot_be_decoded(run, tmp_path, capfd):
    for domain in rotated_digits()[:2]:
        for index in range(40):
            folder = tmp_path / "data" / domain.name / CLASSES[domain.targets[index]]
            folder.mkdir(parents=True, exist_ok=True)
            domain.image(index).save(folder / f"{index:02d}.png")
        for name in CLASSES:
            (tmp_path / "data" / domain.name / name).mkdir(exist_ok=True)
    broken = next((tmp_path / "data" / "rot_0").glob("*/07.png"))
    broken.write_bytes(broken.read_bytes()[:60])
    words = ["--model", best(run), "--dataset", "folder", "--data-dir", tmp_path / "data"]
    with pytest.raises(SystemExit, match=r"evaluate.py: ImageReadError: image='.*07.png': cannot be decoded"):
        evaluate(*words)
    evaluate(*words, "--skip-unreadable", "--output", tmp_path / "scores")
    domains = json.loads((tmp_path / "scores" / "metrics.json").read_text())["domains"]
    assert {name: scores["images"] for name, scores in domains.items()} == {"rot_0": 39, "rot_15": 40}
    for (name, scores), logits, digits in zip(domains.items(), run[1], rotated_digits(), strict=False):
        right = (logits[:40].argmax(1) == torch.tensor(digits.targets[:40])).tolist()
        right = [value for index, value in enumerate(right) if name != "rot_0" or index != 7]
        assert scores["accuracy"] == pytest.approx(np.mean(right))


def test_results_are_not_overwritten_unless_asked_for(run, tmp_path):
    words = ["--model", best(run), "--output", tmp_path, "--split", "out"]
    (tmp_path / "confusion.csv").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"output=.*holds confusion.csv already.*--force"):
        evaluate(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["confusion.csv", "notes.txt"]
    evaluate(*words, "--force")
    assert (tmp_path / "confusion.csv").read_text() != "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "notes.txt"}


def test_without_matplotlib_the_numbers_are_written_and_the_picture_is_not(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what an import of a missing package meets
    evaluate("--model", best(run), "--split", "out", "--output", tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"metrics.json", "per_domain.csv", "confusion.csv", "predictions.csv"}
    for name in ("confusion.png", "projection.png"):
        assert f"{name} is not drawn: drawing needs matplotlib" in caplog.text


def test_the_held_out_domain_comes_first_and_is_what_counts(run, tmp_path, capsys):
    evaluate("--model", best(run), "--output", tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    domain, logits = rotated_digits()[1], run[1][1]
    accuracy = (logits.argmax(1) == torch.tensor(domain.targets)).double().mean().item()
    assert metrics["counted_domains"] == ["rot_15"]
    assert metrics["overall"]["images"] == len(domain)
    assert metrics["overall"]["accuracy"] == metrics["average_accuracy"] == pytest.approx(accuracy)
    assert metrics["worst_domain"] == "rot_15"
    assert len(metrics["domains"]) == 6
    with (tmp_path / "confusion.csv").open() as file:
        counts = [list(map(int, row[1:])) for row in list(csv.reader(file))[1:]]
    assert np.array_equal(counts, confusion_matrix(domain.targets, logits.argmax(1).numpy(), labels=range(10)))
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if line.startswith("rot_")]
    assert rows[0] == ["rot_15", "held", "out"]
    assert [row[1] for row in rows[1:]] == ["train"] * 5


@pytest.mark.slow
def test_domains_are_chosen_by_name(run, tmp_path):
    evaluate("--model", best(run), "--domains", "rot_60", "rot_0", "--output", tmp_path / "two")
    evaluate("--model", best(run), "--domains", "all", "--output", tmp_path / "all")
    two, everything = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("two", "all"))
    domains = everything["domains"]
    assert two["domains"] == domains
    right = sum(domains[name]["images"] * domains[name]["accuracy"] for name in ("rot_0", "rot_60"))
    images = domains["rot_0"]["images"] + domains["rot_60"]["images"]
    assert (two["overall"]["images"], two["overall"]["accuracy"]) == (images, pytest.approx(right / images))
    assert two["worst_domain"] == min(("rot_0", "rot_60"), key=lambda name: domains[name]["accuracy"])
    assert everything["overall"]["images"] == sum(each["images"] for each in domains.values())


def test_accuracies_of_both_splits_are_those_that_a_run_records(run, tmp_path):
    evaluate("--model", best(run), "--output", tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    domains = rotated_digits()
    splits = split_domains(domains, [0, 2, 3, 4, 5], trial_seed=3, holdout_fraction=0.3)
    network = load_trained(best(run), img_size=32)
    config = data_config(network, 32)
    images = EvaluationImages(domains, splits, evaluation_transform((32, 32), config["mean"], config["std"]))
    found = predict(network, evaluation_loader(images, batch_size=500, workers=0))  # what finetune.py records from
    in_acc, out_acc = domain_accuracies(found, len(domains))
    assert [each["in_accuracy"] for each in metrics["domains"].values()] == list(in_acc)
    assert [each["out_accuracy"] for each in metrics["domains"].values()] == list(out_acc)


def test_every_image_has_its_prediction_and_its_features(run, tmp_path):
    words = ["--model", best(run), "--output", tmp_path, "--save-features", tmp_path / "seen.npz"]
    evaluate(*words)
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    saved = np.load(tmp_path / "seen.npz")
    probabilities = torch.cat(run[1]).softmax(1).numpy()
    found = np.array([[float(row[f"P({name})"]) for name in CLASSES] for row in rows])
    assert np.abs(found - probabilities).max() < 1e-4  # domains and images in the data's order
    domains = rotated_digits()
    targets = np.concatenate([domain.targets for domain in domains])
    names = [domain.name for domain in domains for _ in domain.targets]
    assert [row["target"] for row in rows] == [CLASSES[at] for at in targets]
    assert [row["prediction"] for row in rows] == [CLASSES[at] for at in saved["prediction"]]
    assert [row["domain"] for row in rows] == names == list(saved["domain_names"][saved["domain"]])
    assert [row["file"] for row in rows] == list(saved["name"])
    splits = split_domains(domains, [], trial_seed=3, holdout_fraction=0.3)
    inside = [
        position in split.inside for split in splits for position in range(len(split.inside) + len(split.outside))
    ]
    assert [row["split"] == "in" for row in rows] == inside
    network = load_trained(best(run), img_size=32)
    logits = network.head(torch.from_numpy(saved["features"])).double()
    assert torch.allclose(logits, torch.cat(run[1]), atol=1e-4)
    with pytest.raises(SystemExit, match=r"output=.*seen.npz already"):
        evaluate(*words[:2], "--save-features", tmp_path / "seen.npz")


def test_a_label_that_a_spreadsheet_would_compute_stays_a_text(run, tmp_path):
    shutil.copytree(run[0] / "best", tmp_path / "best")
    names = ["=1+1", "+2", "-3", "@4", "<b>five", "six, $x$", 'se"ven', "a\nb", "$\\frac{$", "ten"]
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    (tmp_path / "best" / "config.json").write_text(json.dumps({**config, "label_names": names}))
    for domain in rotated_digits()[:2]:
        for name in names:
            (tmp_path / "data" / domain.name / name).mkdir(parents=True)
        for index in range(20):
            domain.image(index).save(
                tmp_path / "data" / domain.name / names[domain.targets[index]] / f"{index:02d}.png"
            )
    evaluate("--model", f"local-dir:{tmp_path / 'best'}", "--dataset", "folder", "--data-dir", tmp_path / "data",
             "--output", tmp_path / "scores")  # fmt: skip
    with (tmp_path / "scores" / "confusion.csv").open(newline="") as file:
        header = next(csv.reader(file))
    formulas = ("=1+1", "@4")  # the others are numbers
    assert header[1:] == [f"'{name}" if name in formulas else name for name in sorted(names)]
    with (tmp_path / "scores" / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["target"] for row in rows} <= set(header[1:])
    assert all(row["file"].endswith(".png") for row in rows)
    assert set(FILES) == {path.name for path in (tmp_path / "scores").iterdir()}


@pytest.mark.slow
def test_with_an_exported_program_every_file_has_what_it_has_with_pytorch(run, tmp_path, capsys):
    words = ["--model", best(run), "--formats", "onnx", "--rounds", "1", "--features", "--output", str(tmp_path)]
    load_tool("export").main(words)
    evaluate("--model", best(run), "--domains", "all", "--engine", tmp_path / "model.onnx",
             "--output", tmp_path / "scores", "--save-features", tmp_path / "seen.npz")  # fmt: skip
    assert "images of each domain, by onnxruntime" in capsys.readouterr().out
    assert (tmp_path / "scores" / "confusion.csv").read_text() == (run[0] / "scores" / "confusion.csv").read_text()
    metrics, expected = (json.loads((folder / "scores" / "metrics.json").read_text()) for folder in (tmp_path, run[0]))
    assert (metrics.pop("engine"), expected.pop("engine")) == ("onnxruntime", "torch")
    assert metrics.keys() == expected.keys()
    for name, scores in expected["domains"].items():
        assert metrics["domains"][name].pop("role") == scores.pop("role")
        assert metrics["domains"][name] == pytest.approx(scores, rel=1e-4), name
    assert metrics["overall"] == pytest.approx(expected["overall"], rel=1e-4)
    features = torch.from_numpy(np.load(tmp_path / "seen.npz")["features"])
    logits = load_trained(best(run), img_size=32).head(features).double()
    assert torch.allclose(logits, torch.cat(run[1]), atol=1e-4)
