"""The page on which people try a model: its answers are those of predict, and mistakes are one line."""

import csv
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.load_tool import load_tool
from tests.saved_run import saved_run
from timm_moe_dg.errors import ArgumentError, MissingDependencyError, MoeDgError
from timm_moe_dg.inference.demo import Demo, build_page, place_of, serve

CLASSES = tuple(f"class <b>{index}</b>" for index in range(7))


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    return str(path)


def demo_of(folder, name="gmoe_tiny_patch16"):
    saved_run(folder, name, CLASSES)
    return Demo(f"local-dir:{folder / 'best'}")


def predicted(folder, image, *words):
    """The classes and probabilities that the command writes."""
    row = predicted_row(folder, image, *words)
    return {row[f"class{rank}"]: float(row[f"probability{rank}"]) for rank in ("", "_2", "_3", "_4", "_5")}


def predicted_row(folder, image, *words):
    output = folder / "predicted.csv"
    words = ["--model", str(folder), *words, "--top-k", "5", "-j", "0", "--output", str(output), "--force"]
    load_tool("predict").main([image, *words])
    (row,) = csv.DictReader(output.read_text().splitlines())
    return row


def test_the_answer_is_that_of_predict_and_the_experts_are_drawn(image, tmp_path):
    demo = demo_of(tmp_path)
    probabilities, remarks, picture = demo.answer(image)
    assert probabilities == predicted(tmp_path, image)
    assert "Expert of most patches" in remarks
    assert picture.ndim == 3
    assert demo.examples() == []


def test_an_ensemble_answers_beside_the_plain_image(image, tmp_path):
    for number in "01":
        saved_run(tmp_path / number, "gmoe_tiny_patch16", CLASSES)
        shutil.copytree(tmp_path / number / "best", tmp_path / "best" / number)
    probabilities, remarks, picture = Demo(f"local-dir:{tmp_path / 'best'}").answer(image)
    assert probabilities == predicted(tmp_path, image)
    assert (remarks, picture.shape) == ("", (40, 60, 3))


def test_a_place_changes_the_answer_as_it_does_for_predict(image, tmp_path):
    demo = demo_of(tmp_path, "moge_tiny")
    (tmp_path / "places.csv").write_text(f"path,lon,lat\n{image},13.4,52.5\n")
    answers = [demo.answer(image, *place)[0] for place in (("13.4", "52.5"), ("", ""), ("13.4", ""))]
    assert answers[0] == predicted(tmp_path, image, "--metadata", str(tmp_path / "places.csv"))
    assert answers[1] == answers[2] == predicted(tmp_path, image)
    assert answers[0] != answers[1]


def test_training_locations_are_on_the_map_and_their_distance_is_told(image, tmp_path):
    demo = demo_of(tmp_path, "moge_tiny")
    plain = np.asarray(demo.world())
    assert demo.world("inf", "x").tobytes() == demo.world().tobytes()
    marked = np.argwhere((np.asarray(demo.world("13.4", "52.5")) != plain).any(axis=2)).mean(axis=0)
    assert [float(text) for text in place_of(marked[::-1])] == pytest.approx([13.4, 52.5], abs=1)
    network = demo.network
    network.set_coverage(torch.tensor([[13.4, 52.5]]))
    network.set_coverage_radius(100.0)
    from timm_moe_dg.networks.build import data_config, save_network

    save_network(network, tmp_path / "best", CLASSES, data_config(network, 32))
    demo = Demo(f"local-dir:{tmp_path / 'best'}")
    dots = (np.asarray(demo.world()) != plain).any(axis=2)
    assert 0 < dots.sum() < 100
    remarks = demo.answer(image, "-60", "-30")[1]
    assert "km away. The model routes within 100 km." in remarks
    assert "layer: shared" in remarks


@pytest.mark.parametrize(
    ("path", "values", "message"),
    [
        (None, [], "Choose an image first."),
        ("text.png", [], "image='text.png': cannot be read; choose an image file"),
        ("a.png", ["13.4", "abc"], "lat='abc': is no number; correct it, or leave it empty"),
        ("a.png", ["52.5", "120"], "latitude=120.*swapped"),
    ],
)
def test_mistakes_of_visitors_are_one_line_without_a_path_of_the_server(path, values, message, image, tmp_path):
    demo = demo_of(tmp_path, "moge_tiny")
    text = tmp_path / "text.png"
    text.write_text("no image")
    files = {"text.png": str(text), "a.png": image}
    with pytest.raises(MoeDgError, match=message) as caught:
        demo.answer(path and files[path], *values)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_run_has_examples_of_the_held_out_domain_and_sets_of_its_calibration(image, tmp_path):
    words = ["--steps", "1", "--workers", "0", "--cpu-threads", "1", "--batch-size", "2", "--output", str(tmp_path)]
    size = ["--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "--test-domains", "rot_45"]
    load_tool("finetune").main(["--model", "gmoe_tiny_patch16", *size, *words, "--experiment", "run"])
    demo = Demo(f"local-dir:{tmp_path / 'run' / 'best'}")
    examples = demo.examples()
    from timm_moe_dg.data import get_benchmark

    domain = next(domain for domain in get_benchmark("rotated_digits").read(None) if domain.name == "rot_45")
    (first, values), *_ = examples
    assert (len(examples), values) == (6, [])
    assert np.array_equal(np.asarray(Image.open(first)), np.asarray(domain.pixels(0)))
    for path in (image, first):
        row, remarks = predicted_row(tmp_path / "run", path, "--coverage", "0.9"), demo.answer(path)[1]
        assert f"images: **{', '.join(row['set'].split('|'))}**" in remarks
        assert ("unlike" in remarks) == (row["status"] == "unlike")


def test_without_gradio_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(MissingDependencyError, match=r"needs gradio, .* pip install 'timm_moe_dg\[demo\]'"):
        build_page("local-dir:nowhere")


@pytest.mark.slow
def test_the_page_answers_requests_and_hands_out_no_other_file(image, tmp_path):
    pytest.importorskip("gradio")
    client = pytest.importorskip("gradio_client")
    demo = demo_of(tmp_path, "moge_tiny")
    page = build_page(f"local-dir:{tmp_path / 'best'}")
    assert not page.analytics_enabled
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, ssr_mode=False)
    try:
        assert "127.0.0.1" in address
        visitor = client.Client(address, verbose=False)
        label, remarks, _ = visitor.predict(client.handle_file(image), "13.4", "52.5", api_name="/answer")
        probabilities, expected, _ = demo.answer(image, "13.4", "52.5")
        assert {row["label"]: row["confidence"] for row in label["confidences"]} == probabilities
        assert remarks == expected
        secret = {"path": str(Path(__file__).resolve()), "meta": {"_type": "gradio.FileData"}}
        with pytest.raises(client.exceptions.AppError):
            visitor.predict(secret, "", "", api_name="/answer")
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(ArgumentError, match=f"port={port}: 127.0.0.1 cannot be listened on"):
                serve(f"local-dir:{tmp_path / 'best'}", None, "127.0.0.1", port)
    finally:
        page.close()
