"""Predictions of a calibrated network: temperature, status, sets and abstention."""

import json
import os
import shutil
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import timm
import torch
from crepes.base import ConformalClassifier
from PIL import Image

import timm_moe_dg
from tests.inference.conftest import TREES, predict
from tests.load_tool import read_rows, run_tool
from tests.networks.test_calibration import scored, scores
from tests.saved_run import saved_run
from timm_moe_dg.analysis.geography import domains_at
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.inference.predictor import PartOptions, prediction_sets, thresholds
from timm_moe_dg.networks.calibration import CALIBRATION, load_calibration
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.run_folder import save_calibration

COLUMNS = ["logits", "features", "experts", "distance"]


def test_every_image_has_a_status_and_certain_answers(calibrated, tmp_path, caplog):
    words = ["--model", calibrated / "best", calibrated / "images", "--coverage", "0.9", "--abstain", "0.2"]
    predict(*words, "--output", tmp_path / "p.csv", "--columns", "logits")
    table = read_rows(tmp_path / "p.csv")
    assert [row["status"] for row in table] == [*["ok"] * 5, "unlike", "unreadable"]
    calibration = load_calibration(f"local-dir:{calibrated / 'best'}")
    least = sorted(calibration.validation.of_target.tolist(), reverse=True)[int(np.ceil(299 * 0.9)) - 1]
    for row in table[:-1]:
        probabilities = (torch.tensor(json.loads(row["logits"])) / calibration.temperature).softmax(0)
        assert float(row["probability"]) == pytest.approx(probabilities.max().item(), abs=1e-5)
        expected = {CLASSES[index] for index, value in enumerate(probabilities.tolist()) if value >= least}
        assert {*row["set"].split("|")} == expected
        assert row["abstain"] == str(bool(probabilities.max() < calibration.validation.confidence[int(299 * 0.2)]))
    assert table[-1]["set"] == table[-1]["abstain"] == ""
    predict(*words, "--output", tmp_path / "parts")
    parts = pd.read_parquet(tmp_path / "parts")
    assert ["|".join(names) for names in parts["set"][:-1]] == [row["set"] for row in table[:-1]]
    assert [str(value) for value in parts.abstain[:-1]] == [row["abstain"] for row in table[:-1]]
    with pytest.raises(SystemExit, match="holds the parts of another job, whose certainty"):
        predict(*words, "--coverage", "0.8", "--output", tmp_path / "parts")


def test_a_calibration_of_other_weights_is_left_out(calibrated, tmp_path, caplog):
    shutil.copytree(calibrated / "best", tmp_path / "best")
    torch.manual_seed(1)
    saved_run(tmp_path / "other", "gmoe_tiny_patch16", CLASSES)
    shutil.copy(tmp_path / "other" / "best" / "model.safetensors", tmp_path / "best")
    words = ["--model", tmp_path / "best", calibrated / "images", "--output", tmp_path / "p.csv"]
    with pytest.raises(SystemExit, match=r"CheckpointError: .*best/model\.safetensors.*remove weights_sha256"):
        predict(*words)
    config = json.loads((tmp_path / "best" / "config.json").read_text())
    del config["weights_sha256"]
    (tmp_path / "best" / "config.json").write_text(json.dumps(config))
    predict(*words)
    assert "its calibration is of other weights or settings" in caplog.text
    assert {row["status"] for row in read_rows(tmp_path / "p.csv")} == {"ok", "unreadable"}
    with pytest.raises(SystemExit, match=r"is not calibrated: .*evaluate.* --calibrate"):
        predict(*words, "--force", "--coverage", "0.9")


def test_the_recipe_of_a_program_has_the_temperature(calibrated, tmp_path):
    run_tool("export", "--model", calibrated / "best", "--formats", "pt2", "--output", tmp_path)
    recipe = json.loads((tmp_path / "preprocessing.json").read_text())
    assert recipe["temperature"] == load_calibration(f"local-dir:{calibrated / 'best'}").temperature
    assert recipe["probabilities"] == "softmax(logits / temperature)"


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


def test_further_columns_are_those_of_the_network(images, moge):
    network, rows = timm.create_model(moge, pretrained=True).eval(), pd.read_csv(images / "list.csv")
    rows["path"] = [str(images / path) for path in rows.path]
    frame = timm_moe_dg.predict_part(network, rows, columns=COLUMNS, top_k=2, batch_size=4, workers=0)
    logits = torch.tensor(np.stack(frame.logits))
    probabilities, classes = logits.double().softmax(1).sort(descending=True)
    for rank, suffix in enumerate(("", "_2")):
        np.testing.assert_allclose(frame[f"probability{suffix}"], probabilities[:, rank], atol=1e-6)
        assert frame[f"class{suffix}"].tolist() == [TREES[index] for index in classes[:, rank]]
    np.testing.assert_allclose(network.head(torch.tensor(np.stack(frame.features))).detach(), logits, atol=1e-5)
    places = torch.tensor(frame[["lon", "lat"]].to_numpy(np.float32))
    assert [row[-1] for row in frame.experts] == domains_at(network, places).tolist()
    assert frame.experts[4].tolist() == [-1]
    lon, lat = np.radians(frame.lon), np.radians(frame.lat)
    nearest = np.full(10, np.inf)
    for east, north in np.radians(network.metadata_encoder.coverage.points.numpy() / 1e6):
        cosine = np.sin(lat) * np.sin(north) + np.cos(lat) * np.cos(north) * np.cos(lon - east)
        nearest = np.minimum(nearest, 6371.0088 * np.arccos(cosine))
    np.testing.assert_allclose(frame.distance, nearest, rtol=1e-6)


def test_the_expert_of_tokens_is_that_of_most(images, tmp_path):
    saved_run(tmp_path, "gmoe_tiny_patch16", TREES)
    network = timm.create_model(f"local-dir:{tmp_path / 'best'}", pretrained=True).eval()
    paths = sorted(map(str, images.glob("*.png")))
    table = timm_moe_dg.predict_part(network, {"path": paths}, columns=["experts"], batch_size=4, workers=0)
    view = timm.data.create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    for path, experts in zip(paths, table.experts, strict=True):
        with torch.no_grad(), timm_moe_dg.record_routing(network):
            network(view(Image.open(path))[None])
        (routing,) = timm_moe_dg.router_outputs(network).values()
        counts = Counter(routing.expert_indices[:, 0].tolist())
        assert counts[int(experts[0])] == max(counts.values())


def test_unreadable_images_are_in_the_part_with_a_row_or_without(images, moge, tmp_path, caplog):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in "abcdef":
        (folder / f"{name}.png").write_bytes(b"" if name in "bdef" else (images / "0.png").read_bytes())
    words = ["--model", moge, folder, folder / "a.png", "--output", tmp_path / "parts"]
    predict(*words, "--columns", "logits", "features")
    table = pd.read_parquet(words[-1])
    assert [os.path.basename(path)[0] for path in table.path] == [*"abcdef"]
    assert (table.status == "unreadable").tolist() == [name in "bdef" for name in "abcdef"]
    for column in ("class", "probability", "logits", "features"):
        assert table[column].isna().tolist() == (table.status == "unreadable").tolist()
    with pytest.raises(SystemExit, match="holds the parts of another job"):
        predict(*words, "--skip-unreadable")
    words[-1] = tmp_path / "fewer"
    predict(*words, "--skip-unreadable")
    noted = [json.loads(pq.read_schema(path).metadata[b"unreadable"]) for path in sorted(words[-1].glob("part*"))]
    assert [[os.path.basename(path)[0] for path in paths] for paths in noted] == [["b"], ["d", "e", "f"]]
    assert [os.path.basename(path)[0] for path in pd.read_parquet(words[-1]).path] == ["a", "c"]
    assert "unreadable: 3 of 3 images" in caplog.text
