"""Columns of metadata.csv beside coordinates, from one command line to the next: train, resume, score, look."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from tests.data.files import write_csv
from tests.load_tool import run_tool
from timm_moe_dg.analysis import geography

pytestmark = pytest.mark.slow

SIZE = ["patch_size=8", "depth=2", "embed_dim=24", "num_heads=2", "moe_layers=(1,)", "num_experts=3", "top_k=1"]
MODEL = ["--model", "moge_tiny", "--img-size", "16", "--model-kwargs", *SIZE]
QUICK = ["--checkpoint-freq", "2", "-b", "4", "-j", "0", "--cpu-threads", "1"]
COLUMNS = ["--metadata-columns", "month", "elevation"]
PARTS = ("train", "train", "train", "id_val", "id_test", "ood_test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("places")


@pytest.fixture(scope="module")
def table(folder) -> list[dict[str, object]]:
    random, rows = np.random.default_rng(0), []
    for number in range(36):
        path = f"{number}.png"
        Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / path)
        place = {"lon": float(random.uniform(-180, 180)), "lat": float(random.uniform(-90, 90))}
        rows.append(
            {"path": path, "label": "ab"[number % 2], **place, "split": PARTS[number % 6], "group": "north"}
            | {"month": number % 12 + 1, "elevation": "nan" if number == 7 else 100.0 * number, "sensor": "S2"}
        )
    write_csv(folder / "metadata.csv", rows)
    return rows


@pytest.fixture(scope="module")
def run(folder, table, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("output")
    data = ["--dataset", "place_folder", "--data-dir", folder]
    run_tool("finetune", *data, *MODEL, *QUICK, *COLUMNS, "--steps", "4", "--output", output, "--experiment", "a")
    return output / "a"


def test_the_network_has_an_encoder_for_each_column_standardized_by_the_training_images(run, table):
    config = json.loads((run / "best" / "config.json").read_text())
    trained = [row for row in table if row["split"] == "train"]
    months = np.array([row["month"] for row in trained], dtype=float)
    heights = np.array([row["elevation"] for row in trained if row["elevation"] != "nan"], dtype=float)
    actual = config["model_args"]["metadata_columns"]
    assert list(actual) == ["month", "elevation"]
    assert actual["month"] == pytest.approx([months.mean(), months.std()])
    assert actual["elevation"] == pytest.approx([heights.mean(), heights.std()])
    network = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).eval()
    images, metadata = torch.rand(2, 3, 16, 16), torch.tensor([[10.0, 20.0, 1.0, 100.0], [10.0, 20.0, 12.0, 3000.0]])
    assert network(images, metadata).shape == (2, 2)
    assert network.metadata_encoder(images, metadata)[0].shape[1] == 256 + 2 * 64
    assert yaml.safe_load((run / "args.yaml").read_text())["metadata_columns"] == ["month", "elevation"]


def test_a_run_resumes_with_its_columns_and_not_with_others(run, capsys):
    run_tool("finetune", "--resume", run, "--steps", "6")
    assert "\nstep 5 " in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"metadata_columns=\['month'\]"):
        run_tool("finetune", "--resume", run, "--steps", "8", "--metadata-columns", "month")


def test_evaluate_takes_them_from_the_run_and_repeats_its_accuracies(run, folder, tmp_path):
    run_tool("evaluate", "--model", f"local-dir:{run / 'best'}", "-j", 0, "--output", tmp_path / "scores")
    metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert metrics["metadata_columns"] == ["month", "elevation"]
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    actual = metrics["roles"]["ood"]["accuracy"]
    assert any(row["roles"]["ood"]["accuracy"] == pytest.approx(actual) for row in rows)


def test_evaluate_elsewhere_names_the_columns_that_it_lacks(run, folder, tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "copy" / name).write_bytes((run / "best" / name).read_bytes())
    words = ["--model", f"local-dir:{tmp_path / 'copy'}", "--dataset", "place_folder", "--data-dir", folder, "-j", 0]
    with pytest.raises(SystemExit, match=r"metadata_columns=\[\]: .*month elevation"):
        run_tool("evaluate", *words)
    run_tool("evaluate", *words, *COLUMNS)


def test_pictures_of_a_run_with_columns(run, monkeypatch):
    draw, drawn = geography.plot_domain_map, []
    monkeypatch.setattr(geography, "plot_domain_map", lambda *args: drawn.append(args) or draw(*args))
    run_tool("visualize", run, "--role", "id")
    assert (run / "figures" / "map.png").is_file()
    ((_, _, places, _),) = drawn
    assert {rows.shape[1] for rows in places.values()} == {2}  # matplotlib would draw further columns as other points
