"""tools/predict.py: rows are those of logits computed by hand, for image files of every kind."""

import csv

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

from tests.load_tool import load_tool
from tests.saved_run import saved_run

CLASSES = ("ash", "beech", "oak")
QUICK = ["--workers", "0", "--batch-size", "2"]


def predict(*words):
    load_tool("predict").main([*map(str, words), *QUICK])


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
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


@pytest.fixture(scope="module")
def moge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moge")
    saved_run(folder, "moge_tiny", CLASSES)
    return f"local-dir:{folder / 'best'}"


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
            assert row[f"class{suffix}"] == CLASSES[index]
            assert float(row[f"probability{suffix}"]) == pytest.approx(values[index].item(), abs=2e-6)


def test_rows_are_those_of_the_logits_in_the_order_of_the_paths(moge, images, tmp_path):
    predict("--model", moge, images, "--top-k", 3, "--output", tmp_path / "out.csv")
    names = ["a.png", "below/alpha.png", "gray.jpeg", "ink.png", "palette.PNG", "print.jpg"]
    paths = [images / name for name in names]
    expected = probabilities(moge, paths)
    assert len({tuple(values.argsort().tolist()) for values in expected}) > 1
    assert_rows(read(tmp_path / "out.csv"), paths, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_the_tool_names_the_file_that_it_wrote(moge, images, tmp_path, capsys):
    predict("--model", moge, images / "a.png", images / "ink.png", "--output", tmp_path / "out.csv")
    assert capsys.readouterr().out == f"written: {tmp_path / 'out.csv'} (2 images)\n"


def test_files_patterns_and_folders_keep_their_order_and_no_file_comes_twice(moge, images, capsys):
    predict("--model", moge, images / "print.jpg", images / "**" / "*.png", images)
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    names = ["print.jpg", "a.png", "below/alpha.png", "ink.png", "gray.jpeg", "palette.PNG"]
    assert [row["path"] for row in rows] == [str(images / name) for name in names]
    assert list(rows[0]) == ["path", "class", "probability", "status"]


def test_metadata_reaches_the_images_that_have_any(moge, images, tmp_path, caplog):
    names = ["a.png", "below/alpha.png", "gray.jpeg"]
    table = images / "places.csv"
    table.write_text("path,lon,lat\nbelow/alpha.png,-58.4,-34.6\nelsewhere.png,0,0\na.png,139.7,35.7\n")
    paths = [images / name for name in names]
    predict("--model", moge, *paths, "--metadata", table, "--top-k", 3, "--output", tmp_path / "out.csv")
    unknown = float("nan")
    places = torch.tensor([[139.7, 35.7], [-58.4, -34.6], [unknown, unknown]])
    expected = probabilities(moge, paths, places)
    assert (expected[:2] - probabilities(moge, paths)[:2]).abs().max() > 1e-3
    assert_rows(read(tmp_path / "out.csv"), paths, expected)
    assert "without metadata: 1 of 3 images, which go to the shared expert" in caplog.text
    predict("--model", moge, *paths, "--output", tmp_path / "none.csv")
    assert "without metadata: 3 of 3 images, which go to the shared expert; give their places" in caplog.text


def test_an_unreadable_file_has_a_row_or_is_skipped_and_is_named(moge, images, tmp_path, caplog):
    broken = tmp_path / "cut.png"
    broken.write_bytes((images / "a.png").read_bytes()[:400])
    words = ["--model", moge, broken, images / "a.png", images / "ink.png", "--output", tmp_path / "out.csv"]
    predict(*words, "--columns", "logits")
    first, *others = read(tmp_path / "out.csv")
    assert first == {"path": str(broken), "class": "", "probability": "", "status": "unreadable", "logits": ""}
    assert [row["status"] for row in others] == ["shared_expert"] * 2
    assert "cut.png': cannot be decoded" in caplog.text
    caplog.clear()
    predict(*words, "--skip-unreadable", "--force")
    assert [row["path"] for row in read(tmp_path / "out.csv")] == [str(images / "a.png"), str(images / "ink.png")]
    error = caplog.text
    assert "unreadable: 1 of 3 images" in error
    assert "cut.png" in error
    with pytest.raises(SystemExit, match="none can be decoded"):
        predict("--model", moge, broken, "--skip-unreadable")


def test_a_checkpoint_without_names_gives_numbers(images, tmp_path):
    network = timm.create_model("test_vit", num_classes=3)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    predict("--model", "test_vit", "--initial-checkpoint", tmp_path / "weights.pth", images / "a.png", "--top-k", 3,
            "--output", tmp_path / "out.csv")  # fmt: skip
    (row,) = read(tmp_path / "out.csv")
    assert sorted(row[key] for key in ("class", "class_2", "class_3")) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{images}/absent.png"], "images='.*absent.png': no such file"),
        (["{images}/*.tif"], r"images='.*\*.tif': no such file, or no image"),
        (["{images}", "--top-k", "4"], "top_k=4: the model has 3 classes"),
        (["{images}", "--metadata", "{images}/notes.txt"], "lacks the columns path;"),
        (["{images}", "--output", "{images}/notes.txt"], "holds notes.txt already"),
    ],
)
def test_a_mistake_is_named(moge, images, words, message):
    with pytest.raises(SystemExit, match=message):
        predict("--model", moge, *(word.format(images=images) for word in words))
    assert (images / "notes.txt").read_text() == "no image"


def test_metadata_for_a_model_that_reads_none_is_refused(images, tmp_path):
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES)
    with pytest.raises(SystemExit, match=r"metadata='x\.csv': .*does not read any"):
        predict("--model", f"local-dir:{tmp_path / 'best'}", images, "--metadata", "x.csv")
