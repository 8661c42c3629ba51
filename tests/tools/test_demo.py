"""The page on which people try a model: its answers are those of predict, and mistakes are one line."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.load_tool import load_tool, read_rows, run_tool
from tests.saved_run import saved_run
from timm_moe_dg.errors import MoeDgError
from timm_moe_dg.inference import predictor as inference
from timm_moe_dg.networks.build import data_config, save_network

CLASSES = tuple(f"class <b>{index}</b>" for index in range(7))
demo = load_tool("demo")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture(scope="module")
def moge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moge")
    saved_run(folder, "moge_tiny", CLASSES)
    return folder


def predicted(folder, image, *words):
    """The row that the command writes, and its classes with their probabilities."""
    words = ["--model", folder, *words, "--top-k", 5, "-j", 0, "--output", folder / "predicted.csv", "--force"]
    run_tool("predict", image, *words)
    (row,) = read_rows(folder / "predicted.csv")
    return row, {row[f"class{rank}"]: float(row[f"probability{rank}"]) for rank in ("", "_2", "_3", "_4", "_5")}


def test_the_answer_is_that_of_predict_for_an_ensemble_too(image, tmp_path):
    for number in "01":
        saved_run(tmp_path / number, "gmoe_tiny_patch16", CLASSES)
        shutil.copytree(tmp_path / number / "best", tmp_path / "best" / number)
    for folder in (tmp_path / "0", tmp_path):
        probabilities, remarks = demo.answer(demo.open_predictor(f"local-dir:{folder / 'best'}"), image)
        assert (probabilities, remarks) == (predicted(folder, image)[1], "")


def test_a_place_changes_the_answer_as_it_does_for_predict(image, moge):
    (moge / "places.csv").write_text(f"path,lon,lat\n{image},13.4,0\n")
    predictor = demo.open_predictor(f"local-dir:{moge / 'best'}")
    answers = [demo.answer(predictor, image, *place) for place in ((13.4, 0), (None, None), (13.4, None))]
    assert answers[0][0] == predicted(moge, image, "--metadata", moge / "places.csv")[1]
    assert answers[1][0] == answers[2][0] == predicted(moge, image)[1]
    assert answers[0][0] != answers[1][0]
    assert ["No place is given" in remarks for _, remarks in answers] == [False, True, True]


def test_location_ids_are_answered_as_by_predict_and_the_network_is_loaded_once(image, tmp_path, monkeypatch):
    network = saved_run(tmp_path, "moge_small_patch32_384", CLASSES)
    network.set_seen_locations([7])
    save_network(network, tmp_path / "best", CLASSES, data_config(network, 32))
    (tmp_path / "ids.csv").write_text(f"path,location\n{image},7\n")
    loads, load = [], inference.load_predictor
    counted = lambda *words, **options: loads.append(words) or load(*words, **options)  # noqa: E731
    monkeypatch.setattr(inference, "load_predictor", counted)
    predictor = demo.open_predictor(f"local-dir:{tmp_path / 'best'}")
    assert len(loads) == 1
    known, unknown, new = (demo.answer(predictor, image, location) for location in (7, None, 8))
    assert known[0] == predicted(tmp_path, image, "--metadata", str(tmp_path / "ids.csv"))[1]
    assert unknown[0] == new[0] == predicted(tmp_path, image)[1] != known[0]
    assert ["without training images" in remarks for _, remarks in (known, unknown, new)] == [False, True, True]


def test_a_calibrated_model_has_sets_and_a_status(image, tmp_path):
    words = ["--dataset", "rotated_digits", "--test-domains", "rot_75", "--workers", 0, "--batch-size", 500]
    saved_run(tmp_path, "gmoe_tiny_patch16", [str(index) for index in range(10)])
    run_tool("evaluate", "--model", tmp_path, *words, "--calibrate")
    row, _ = predicted(tmp_path, image, "--coverage", "0.9")
    _, remarks = demo.answer(demo.open_predictor(f"local-dir:{tmp_path / 'best'}"), image)
    assert f"images: **{', '.join(row['set'].split('|'))}**" in remarks
    assert ("unlike" in remarks) == (row["status"] == "unlike")


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        (None, [], "Choose an image first."),
        ("text.png", [], "text.png cannot be read"),
        ("a.png", [52.5, 120.0], "latitude=120.*swapped"),
    ],
)
def test_mistakes_of_visitors_are_one_line_without_a_path_of_the_server(file, values, message, image, moge, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    shutil.copy(image, tmp_path)
    with pytest.raises(MoeDgError, match=message) as caught:
        demo.answer(demo.open_predictor(f"local-dir:{moge / 'best'}"), file and str(tmp_path / file), *values)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.slow
def test_the_page_answers_requests_and_hands_out_no_other_file(image, moge):
    pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    model = f"local-dir:{moge / 'best'}"
    page = demo.build_page(model)
    assert not page.analytics_enabled
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        assert "127.0.0.1" in address
        visitor = client.Client(address, verbose=False)
        label, remarks = visitor.predict(client.handle_file(image), 13.4, 52.5, api_name="/answer")
        probabilities, expected = demo.answer(demo.open_predictor(model), image, 13.4, 52.5)
        assert {row["label"]: row["confidence"] for row in label["confidences"]} == probabilities
        assert remarks == expected
        secret = {"path": str(Path(__file__).resolve()), "meta": {"_type": "gradio.FileData"}}
        with pytest.raises(client.exceptions.AppError):
            visitor.predict(secret, None, None, api_name="/answer")
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(SystemExit, match=f"port={port}: cannot be listened on"):
                demo.main([str(moge), "--port", str(port)])
    finally:
        page.close()
