"""Folders of predictions: the same rows whatever processes write them, and nothing of another job."""

import csv
import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import timm
import torch
import yaml
from PIL import Image

import timm_moe_dg
from tests.load_tool import load_tool
from tests.saved_run import saved_run
from timm_moe_dg.analysis.geography import domains_at
from timm_moe_dg.inference.predict import Shard

CLASSES = ("ash", "beech", "oak")
QUICK = ["--workers", "0", "--batch-size", "2", "--part-size", "3"]
COLUMNS = ["--columns", "logits", "features", "experts", "distance", "--top-k", "2"]


def predict(*words):
    load_tool("predict").main([*map(str, words), *QUICK])


def parts(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Ten images and a list of them with coordinates."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(10)]
    for name in names:
        Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / name)
    lon, lat = noise.uniform(-180, 180, 10), noise.uniform(-90, 90, 10)
    lon[4] = lat[4] = math.nan
    pd.DataFrame({"path": names, "lon": lon, "lat": lat}).to_csv(folder / "list.csv", index=False, na_rep="nan")
    return folder


@pytest.fixture(scope="module")
def moge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moge")
    network = saved_run(folder, "moge_tiny", CLASSES)
    network.set_coverage(torch.tensor([[10.0, 50.0], [-60.0, -30.0]]))
    from timm_moe_dg.networks.build import data_config, save_network

    save_network(network, folder / "best", CLASSES, data_config(network, 32))
    return f"local-dir:{folder / 'best'}"


@pytest.fixture(scope="module")
def whole(images, moge, tmp_path_factory):
    """The folder that one process wrote."""
    folder = tmp_path_factory.mktemp("whole") / "parts"
    predict("--model", moge, images / "list.csv", "--output", folder, *COLUMNS)
    return folder


def test_the_rows_of_a_folder_are_those_of_the_table(images, moge, whole, tmp_path, capsys):
    frame = pd.read_parquet(whole)
    assert sorted(parts(whole)) == ["_job.json", *(f"part-0000{number}.parquet" for number in range(4))]
    assert [len(pd.read_parquet(path)) for path in sorted(whole.glob("part*"))] == [3, 3, 3, 1]
    given = pd.read_csv(images / "list.csv")
    pd.testing.assert_frame_equal(frame[["lon", "lat"]], given[["lon", "lat"]], check_exact=True)
    predict("--model", moge, images / "list.csv", *COLUMNS)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert list(rows[0]) == [name for name in frame if name not in ("lon", "lat")]
    for row, (_, expected) in zip(rows, frame.iterrows(), strict=True):
        assert (row["path"], row["class"], row["class_2"]) == (expected.path, expected["class"], expected.class_2)
        assert float(row["probability"]) == pytest.approx(expected.probability, abs=1e-6)
        for name in ("logits", "features", "experts"):
            np.testing.assert_allclose(json.loads(row[name]), expected[name], atol=1e-6)


def test_further_columns_are_those_of_the_network(images, moge, whole):
    network, frame = timm.create_model(moge, pretrained=True).eval(), pd.read_parquet(whole)
    logits = torch.tensor(np.stack(frame.logits))
    probabilities, classes = logits.double().softmax(1).sort(descending=True)
    for rank, suffix in enumerate(("", "_2")):
        np.testing.assert_allclose(frame[f"probability{suffix}"], probabilities[:, rank], atol=1e-6)
        assert frame[f"class{suffix}"].tolist() == [CLASSES[index] for index in classes[:, rank]]
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
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES)
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


def test_shards_in_any_order_and_restarts_write_the_same_bytes(images, moge, whole, tmp_path, monkeypatch):
    words = ["--model", moge, images / "list.csv", "--output", tmp_path / "parts", *COLUMNS]
    predict(*words, "--shard", "2/3")
    assert sorted(parts(tmp_path / "parts")) == ["_job.json", "part-00002.parquet"]
    leftover = tmp_path / "parts" / ".part-00001.parquet.0a1b2c3d"
    leftover.write_bytes(b"of a process that was killed")
    for rank in "10":  # two processes of a launcher share 1/3; they have parts 1, 4, ... and parts 3 ... of six shares
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        predict(*words)
    assert parts(tmp_path / "parts") == parts(whole)
    monkeypatch.undo()
    before = (tmp_path / "parts" / "part-00001.parquet").stat().st_mtime_ns
    (tmp_path / "parts" / "part-00003.parquet").unlink()
    predict(*words)
    assert parts(tmp_path / "parts") == parts(whole)
    assert (tmp_path / "parts" / "part-00001.parquet").stat().st_mtime_ns == before


def test_each_part_belongs_to_one_process():
    for total, size in ((1, 1), (3, 1), (2, 4)):
        shards = [
            Shard.of(f"{index}/{total}", {"RANK": str(rank), "WORLD_SIZE": str(size)})
            for index in range(total)
            for rank in range(size)
        ]
        assert Counter(part for shard in shards for part in range(shard.first, 99, shard.step)) == Counter(range(99))


def test_predict_part_gives_the_rows_of_the_parts(images, moge, whole, monkeypatch):
    monkeypatch.chdir(images)
    network = timm.create_model(moge, pretrained=True).eval()
    options = {"workers": 0, "top_k": 2, "batch_size": 2, "columns": COLUMNS[1:5]}
    rows = pd.read_csv("list.csv")[:3]
    table = timm_moe_dg.predict_part(network, rows.assign(path=[str(images / path) for path in rows.path]), **options)
    expected = pd.read_parquet(whole / "part-00000.parquet")
    assert table.columns.tolist() == expected.columns.tolist()
    for name in table:
        np.testing.assert_array_equal(np.stack(table[name].array), np.stack(expected[name].array))
    empty = timm_moe_dg.predict_part(network, rows[:0], **options)
    assert empty.columns.tolist() == expected.columns.tolist()
    with pytest.raises(timm_moe_dg.errors.DataError, match="'rows': lacks the columns path"):
        timm_moe_dg.predict_part(network, {"file": ["0.png"]}, workers=0)
    with pytest.raises(timm_moe_dg.errors.OptionError, match="output='x': predict_part has no such option"):
        timm_moe_dg.predict_part(network, rows, output="x")
    again = timm_moe_dg.predict(moge, str(images / "list.csv"), output=whole, part_size=3, **options).part.tolist()
    assert again == [0, 1, 2, 3]


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


def test_an_image_that_is_listed_twice_has_two_rows(images, moge, tmp_path, caplog):
    (images / "twice.csv").write_text("path,lon,lat\n0.png,0,0\n1.png,0,0\n0.png,90,0\n")
    predict("--model", moge, images / "twice.csv", "--output", tmp_path / "parts")
    assert pd.read_parquet(tmp_path / "parts").lon.tolist() == [0, 0, 90]
    assert "part 0: 1 images come twice" in caplog.text


def test_another_job_in_the_same_folder_is_refused(images, moge, whole, tmp_path):
    saved_run(tmp_path, "moge_tiny", CLASSES)
    words = ["--output", whole, *COLUMNS]
    before = parts(whole)
    table = images / "list.csv"
    rows = [
        (["--model", f"local-dir:{tmp_path / 'best'}", table], "columns='distance': .* stores no training locations"),
        (["--coverage-radius", "10", "--model", moge, table], "holds the parts of another job, whose model is '"),
        (["--top-k", "1", "--model", moge, table], "another job, whose columns is "),
        (["--model", moge, table, images / "0.png"], "another job, whose images is "),
        (["--force", "--model", moge, table], "force=True: parts are never replaced"),
    ]
    for further, message in rows:
        with pytest.raises(SystemExit, match=message):
            predict(*words, *further)
    for content, message in ((b"{", "its _job.json is damaged"), (b"[]", "its _job.json is damaged")):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "_job.json").write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            predict("--model", moge, images, "--output", tmp_path / "other")
    assert parts(whole) == before


def test_parts_of_other_images_and_damaged_ones_are_refused(images, moge, tmp_path):
    folder, output = tmp_path / "images", tmp_path / "parts"
    folder.mkdir()
    for name in "bcdefg":
        (folder / f"{name}.png").write_bytes((images / "0.png").read_bytes())
    words = ["--model", moge, folder, "--output", output]
    predict(*words)
    (folder / "a.png").write_bytes((images / "0.png").read_bytes())
    with pytest.raises(SystemExit, match=r"part-00000.parquet': was written from other images; images were added"):
        predict(*words)
    for name in "afge":
        (folder / f"{name}.png").unlink()
    with pytest.raises(SystemExit, match=r"part-00001.parquet': was written from other images"):
        predict(*words)
    for name in "efg":
        (folder / f"{name}.png").write_bytes((images / "0.png").read_bytes())
    good = (output / "part-00001.parquet").read_bytes()
    for content in (b"", b"text", good[:-10]):
        (output / "part-00001.parquet").write_bytes(content)
        with pytest.raises(
            SystemExit, match=r"part-00001.parquet': is no complete Parquet file; remove it, and the sa"
        ):
            predict(*words)
    (output / "part-00001.parquet").unlink()
    predict(*words)
    assert (output / "part-00001.parquet").read_bytes() == good


def test_shards_of_other_images_are_refused(images, moge, tmp_path):
    (tmp_path / "images").mkdir()
    for name in "bcdefg":
        (tmp_path / "images" / f"{name}.png").write_bytes((images / "0.png").read_bytes())
    words = ["--model", moge, tmp_path / "images", "--output", tmp_path / "parts", "--shard"]
    predict(*words, "0/2")
    (tmp_path / "images" / "a.png").write_bytes((images / "0.png").read_bytes())  # moves all others to later places
    with pytest.raises(SystemExit, match=r"part-00000.parquet': was written from other images; images were added"):
        predict(*words, "1/2")


def test_the_job_of_the_page_has_a_command_of_predict():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "predict_at_scale.md").read_text()
    job = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    words = job["run"].replace("$SHARD", job["envs"]["SHARD"]).split()
    assert load_tool("predict").build_parser().parse_args(words[2:]).shard == "0/1"
