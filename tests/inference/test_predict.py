"""Predictions of image files as a CSV table or a folder of parts: rows are those of logits computed by hand."""

import csv
import json
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import yaml
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import timm_moe_dg
from tests.inference.conftest import TREES, predict
from tests.load_tool import load_tool, read_rows
from tests.saved_run import saved_run
from timm_moe_dg.inference.predict import Shard
from timm_moe_dg.networks.build import data_config, save_network

COLUMNS = ["--columns", "logits", "features", "experts", "distance", "--top-k", "2"]


def parts(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def copies(source, folder, names):
    """Writes an image under other names, with its time."""
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy2(source, folder / f"{name}.png")
    return folder


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """A folder of image files in modes that cameras and drawing programs write, one in a folder of its own."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 255, (6, 40, 30, 4), dtype=np.uint8)
    pictures = [Image.fromarray(values, "RGBA") for values in noise]
    (folder / "below").mkdir()
    pictures[0].save(folder / "below" / "alpha.png")
    pictures[1].convert("CMYK").save(folder / "print.jpg")
    pictures[2].convert("RGB").convert("P").save(folder / "palette.PNG")
    pictures[3].convert("L").save(folder / "gray.jpeg")
    pictures[4].convert("RGB").save(folder / "a.png")
    pictures[5].convert("1").save(folder / "ink.png")
    (folder / "notes.txt").write_text("no image")
    return folder


def probabilities(model, paths, *metadata):
    """What the saved model says about each file, read with timm's own transform."""
    network = timm.create_model(model, pretrained=True).eval()
    view = create_transform(**resolve_model_data_config(network), is_training=False)
    batch = torch.stack([view(Image.open(path).convert("RGB")) for path in paths])
    with torch.no_grad():
        return network(batch, *metadata).softmax(1)


def assert_rows(rows, paths, expected):
    """Classes from best to worst, with their probabilities."""
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    for row, values in zip(rows, expected, strict=True):
        for rank, index in enumerate(values.argsort(descending=True).tolist(), start=1):
            suffix = f"_{rank}" if rank > 1 else ""
            assert row[f"class{suffix}"] == TREES[index]
            assert float(row[f"probability{suffix}"]) == pytest.approx(values[index].item(), abs=2e-6)


def test_rows_are_those_of_the_logits_in_the_order_of_the_paths(moge, modes, tmp_path, capsys):
    predict("--model", moge, modes, "--top-k", 3, "--output", tmp_path / "out.csv")
    names = ["a.png", "below/alpha.png", "gray.jpeg", "ink.png", "palette.PNG", "print.jpg"]
    paths = [modes / name for name in names]
    expected = probabilities(moge, paths)
    assert len({tuple(values.argsort().tolist()) for values in expected}) > 1
    assert_rows(read_rows(tmp_path / "out.csv"), paths, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert capsys.readouterr().out == f"written: {tmp_path / 'out.csv'} (6 images)\n"


def test_files_patterns_and_folders_keep_their_order_and_no_file_comes_twice(moge, modes, capsys):
    predict("--model", moge, modes / "print.jpg", modes / "**" / "*.png", modes)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    names = ["print.jpg", "a.png", "below/alpha.png", "ink.png", "gray.jpeg", "palette.PNG"]
    assert [row["path"] for row in rows] == [str(modes / name) for name in names]
    assert list(rows[0]) == ["path", "class", "probability", "status"]


def test_metadata_reaches_the_images_that_have_any(moge, modes, tmp_path, caplog):
    names = ["a.png", "below/alpha.png", "gray.jpeg"]
    table = modes / "places.csv"
    table.write_text("path,lon,lat\nbelow/alpha.png,-58.4,-34.6\nelsewhere.png,0,0\na.png,139.7,35.7\n")
    paths = [modes / name for name in names]
    predict("--model", moge, *paths, "--metadata", table, "--top-k", 3, "--output", tmp_path / "out.csv")
    unknown = float("nan")
    places = torch.tensor([[139.7, 35.7], [-58.4, -34.6], [unknown, unknown]])
    expected = probabilities(moge, paths, places)
    assert (expected[:2] - probabilities(moge, paths)[:2]).abs().max() > 1e-3
    assert_rows(read_rows(tmp_path / "out.csv"), paths, expected)
    assert "without metadata: 1 of 3 images, which go to the shared expert" in caplog.text
    predict("--model", moge, *paths, "--output", tmp_path / "none.csv")
    assert "without metadata: 3 of 3 images, which go to the shared expert; give their places" in caplog.text


def test_an_unreadable_file_has_a_row_or_is_skipped_and_is_named(moge, modes, tmp_path, caplog):
    broken = tmp_path / "cut.png"
    broken.write_bytes((modes / "a.png").read_bytes()[:400])
    words = ["--model", moge, broken, modes / "a.png", modes / "ink.png", "--output", tmp_path / "out.csv"]
    predict(*words, "--columns", "logits")
    first, *others = read_rows(tmp_path / "out.csv")
    assert first == {"path": str(broken), "class": "", "probability": "", "status": "unreadable", "logits": ""}
    assert [row["status"] for row in others] == ["shared_expert"] * 2
    assert "cut.png': cannot be decoded" in caplog.text
    caplog.clear()
    predict(*words, "--skip-unreadable", "--force")
    assert [row["path"] for row in read_rows(tmp_path / "out.csv")] == [str(modes / "a.png"), str(modes / "ink.png")]
    assert "unreadable: 1 of 3 images" in caplog.text
    assert "cut.png" in caplog.text
    with pytest.raises(SystemExit, match="none can be decoded"):
        predict("--model", moge, broken, "--skip-unreadable")


def test_a_checkpoint_without_names_gives_numbers(modes, tmp_path):
    network = timm.create_model("test_vit", num_classes=3)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    predict("--model", "test_vit", "--initial-checkpoint", tmp_path / "weights.pth", modes / "a.png", "--top-k", 3,
            "--output", tmp_path / "out.csv")  # fmt: skip
    (row,) = read_rows(tmp_path / "out.csv")
    assert sorted(row[key] for key in ("class", "class_2", "class_3")) == ["0", "1", "2"]


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


def test_an_image_that_is_listed_twice_has_two_rows(images, moge, tmp_path, caplog):
    (images / "twice.csv").write_text("path,lon,lat\n0.png,0,0\n1.png,0,0\n0.png,90,0\n")
    predict("--model", moge, images / "twice.csv", "--output", tmp_path / "parts")
    assert pd.read_parquet(tmp_path / "parts").lon.tolist() == [0, 0, 90]
    assert "part 0: 1 images come twice" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{modes}/*.tif"], r"images='.*\*.tif'"),
        (["{modes}", "--top-k", "4"], "top_k=4"),
        (["{modes}", "--metadata", "{modes}/notes.txt"], "lacks the columns path;"),
        (["{modes}", "--output", "{modes}/notes.txt"], "holds notes.txt already"),
        (["{modes}", "--model", "{plain}", "--metadata", "x.csv"], r"metadata='x\.csv'"),
        (["{modes}", "--model", "{plain}", "--columns", "distance"], "columns='distance'"),
        (["{images}/list.csv", "--model", "{plain}", "--output", "{whole}"], "another job, whose model is '"),
        (["{images}/list.csv", "--coverage-radius", "10", "--output", "{whole}"], "another job, whose model is '"),
        (["{images}/list.csv", "--top-k", "1", "--output", "{whole}"], "another job, whose columns is "),
        (["{images}/list.csv", "{images}/0.png", *COLUMNS, "--output", "{whole}"], "another job, whose images is "),
        (["{images}/0.png", "--output", "{cut}"], "its _job.json is damaged"),
        (["{images}/0.png", "--output", "{list}"], "its _job.json is damaged"),
    ],
)
def test_a_mistake_is_named_and_changes_no_file(moge, modes, images, whole, tmp_path, words, message):
    for name, job in (("cut", "{"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_job.json").write_text(job)
    saved_run(tmp_path, "gmoe_tiny_patch16", TREES)
    places = {"modes": modes, "images": images, "whole": whole}
    places |= {"plain": tmp_path / "best", "cut": tmp_path / "cut", "list": tmp_path / "list"}
    before = parts(whole)
    with pytest.raises(SystemExit, match=message):
        predict("--model", moge, *(word.format(**places) for word in words))
    assert parts(whole) == before
    assert (modes / "notes.txt").read_text() == "no image"


def test_parts_of_other_images_and_damaged_ones_are_refused(images, moge, tmp_path):
    folder, output = copies(images / "0.png", tmp_path / "images", "bcdefg"), tmp_path / "parts"
    words = ["--model", moge, folder, "--output", output]
    predict(*words)
    copies(images / "0.png", folder, "a")  # moves all others to later places
    with pytest.raises(SystemExit, match=r"part-00000.parquet': was written from other images"):
        predict(*words)
    for name in "afge":
        (folder / f"{name}.png").unlink()
    with pytest.raises(SystemExit, match=r"part-00001.parquet': was written from other images"):
        predict(*words)
    copies(images / "0.png", folder, "efg")
    good = (output / "part-00001.parquet").read_bytes()
    for content in (b"", b"text", good[:-10]):
        (output / "part-00001.parquet").write_bytes(content)
        with pytest.raises(SystemExit, match=r"part-00001.parquet': is no complete Parquet file"):
            predict(*words)
    (output / "part-00001.parquet").unlink()
    predict(*words)
    assert (output / "part-00001.parquet").read_bytes() == good
    (output / "part-00001.parquet").unlink()
    copies(images / "0.png", folder, "a")
    with pytest.raises(SystemExit, match=r"part-00000.parquet': was written from other images"):
        predict(*words, "--shard", "1/2")  # to which part 0 does not belong


@pytest.mark.parametrize("kind", ["folder", "list", "tar", "link"])
def test_parts_of_pictures_that_were_replaced_are_refused(kind, images, moge, tmp_path):
    folder, output = copies(images / "0.png", tmp_path / "images", "abcd"), tmp_path / "parts"
    source = {"list": tmp_path / "list.csv", "tar": tmp_path / "a.tar"}.get(kind, folder)
    if kind == "list":
        source.write_text("path\n" + "".join(f"images/{name}.png\n" for name in "abcd"))
    if kind == "link":
        (folder / "d.png").rename(tmp_path / "elsewhere.png")
        (folder / "d.png").symlink_to(tmp_path / "elsewhere.png")

    def write(number):
        for name in "abcd":
            (folder / f"{name}.png").write_bytes((images / f"{number if name == 'd' else 0}.png").read_bytes())
        if kind == "tar":
            with tarfile.open(source, "w") as tar:
                tar.add(folder, "s")

    write(0)
    words = ["--model", moge, source, "--output", output]
    predict(*words)
    before = parts(output)
    predict(*words)
    write(1)
    with pytest.raises(
        SystemExit, match=r"part-0000[01].parquet': was written from other images; images were .*replaced"
    ):
        predict(*words)
    assert parts(output) == before
    shutil.rmtree(output)
    predict(*words)


def test_the_page_s_calls_give_the_names_of_classes_and_a_spreadsheet(images, tmp_path, monkeypatch):
    names = ["NA", "-5", "=1+1", "007", "\u00f6 ", "+x"]
    network = saved_run(tmp_path, "gmoe_tiny_patch16", names)
    with torch.no_grad():
        network.head.weight.mul_(20)  # or one class is the first of all images
    save_network(network, tmp_path / "best", names, data_config(network, 32))
    (tmp_path / "cut.png").write_bytes(b"")
    sources = [*sorted(images.glob("*.png")), tmp_path / "cut.png"]
    predict("--model", tmp_path / "best", *sources, "--top-k", 3, "--output", tmp_path / "predictions.csv")
    page = (Path(__file__).parents[2] / "docs" / "guides" / "train.md").read_text()
    read, save = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(read, values)
    answers = timm_moe_dg.predict(tmp_path / "best", list(map(str, sources)), top_k=3, workers=0)
    for name in ("class", "class_2", "class_3"):
        assert values["table"][name].tolist() == answers[name].fillna("").tolist()
    assert len({*values["table"]["class"]}) > 2
    assert values["table"].probability.tolist() == pytest.approx(answers.probability.tolist(), nan_ok=True)
    pytest.importorskip("openpyxl")
    exec(save, values)
    sheet = pd.read_excel(
        "predictions.xlsx", dtype={"class": str}, keep_default_na=False, na_values={"probability": ""}
    )
    assert sheet["class"].tolist() == values["written"]["class"].tolist()
    assert sheet.probability.dtype == float


def test_the_job_of_the_page_has_a_command_of_predict():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "predict_at_scale.md").read_text()
    job = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    words = job["run"].replace("$SHARD", job["envs"]["SHARD"]).split()
    assert load_tool("predict").build_parser().parse_args(words[2:]).shard == "0/1"
