"""tools/export.py: what it writes can be used with nothing but the file and preprocessing.json."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.load_tool import run_tool
from tests.saved_run import saved_run
from timm_moe_dg import networks
from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.networks.build import data_config

ROOT = Path(__file__).parents[2]
CLASSES = ("ash", "beech", "oak")
FILES = ["model.onnx", "model.pt2", "preprocessing.json"]
PHOTOGRAPHS = [Image.fromarray(pixels) for pixels in load_sample_images().images]

pytestmark = pytest.mark.slow  # programs are exported and run


@pytest.fixture(scope="module", params=["gmoe_tiny_patch16", "moge_tiny"])
def exported(request, tmp_path_factory):
    """A folder of programs, the model that they were made of, and what the tool printed."""
    folder = tmp_path_factory.mktemp(request.param)
    saved_run(folder, request.param, CLASSES)
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *words, **options: printed.append(" ".join(map(str, words))))
        run_tool("export", "--model", f"local-dir:{folder / 'best'}", "--output", folder / "programs")
    model = timm.create_model(f"local-dir:{folder / 'best'}", pretrained=True).eval()
    return folder / "programs", model, "\n".join(printed)


def prepared(folder, image):
    """An image as preprocessing.json says, by hand."""
    recipe = json.loads((folder / "preprocessing.json").read_text())
    assert (recipe["interpolation"], recipe["crop_mode"]) == ("bilinear", "squash")
    _, height, width = recipe["input_size"]
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    return ((pixels - np.array(recipe["mean"])) / np.array(recipe["std"])).transpose(2, 0, 1).astype(np.float32)


def inputs_of(folder, model, number):
    images = np.stack([prepared(folder, PHOTOGRAPHS[index % 2].rotate(30 * index)) for index in range(number)])
    if not hasattr(model, "metadata_encoder"):
        return [images]
    places = np.random.default_rng(0).uniform((-180, -90), (180, 90), (number, 2)).astype(np.float32)
    places[-1] = float("nan")
    return [images, places]


def programs(folder):
    """The programs, read with nothing of this package."""
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    names = [node.name for node in session.get_inputs()]
    yield lambda *inputs: session.run(["logits"], dict(zip(names, inputs, strict=True)))[0]
    program = torch.export.load(folder / "model.pt2").module()
    yield lambda *inputs: program(*map(torch.from_numpy, inputs)).detach().numpy()


def test_every_program_answers_as_the_model_does_for_batches_of_any_size(exported):
    folder, model, _ = exported
    assert sorted(path.name for path in folder.iterdir()) == FILES
    for number in (1, 2, 11):
        inputs = inputs_of(folder, model, number)
        with torch.no_grad():
            expected = model(*map(torch.from_numpy, inputs)).numpy()
        for program in programs(folder):
            np.testing.assert_allclose(program(*inputs), expected, rtol=0, atol=1e-4)


def test_unknown_metadata_leaves_the_shared_expert(exported):
    folder, model, _ = exported
    if not hasattr(model, "metadata_encoder"):
        return
    images, places = inputs_of(folder, model, 4)
    with torch.no_grad():
        shared = model(torch.from_numpy(images)).numpy()
    for program in programs(folder):
        np.testing.assert_allclose(program(images, np.full_like(places, np.nan)), shared, rtol=0, atol=1e-4)
        assert np.abs(program(images, places) - shared).max() > 1e-3


def test_onnx_file_states_its_opset_and_names(exported):
    folder, model, _ = exported
    file = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(file)
    assert [(opset.domain, opset.version) for opset in file.opset_import] == [("", 20)]
    names = ["images", "metadata"] if hasattr(model, "metadata_encoder") else ["images"]
    assert [node.name for node in file.graph.input] == names
    assert all(node.type.tensor_type.shape.dim[0].dim_param for node in file.graph.input)  # batches of any size
    recipe = json.loads((folder / "preprocessing.json").read_text())
    assert (recipe["classes"], recipe["input_size"], list(recipe["inputs"])) == (list(CLASSES), [3, 32, 32], names)


def test_the_recipe_of_the_page_reads_images_of_16_bits_as_the_tools_do(exported, tmp_path, monkeypatch, capsys):
    folder, model, _ = exported
    values = np.random.default_rng(0).integers(0, 2**16, (40, 30)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "photograph.png")
    (tmp_path / "exported").symlink_to(folder)
    page, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "export.md").read_text(), re.DOTALL)
    read = json.loads((folder / "preprocessing.json").read_text())["read"]
    assert read == "RGB without transparency, in full depth, turned by EXIF"
    if hasattr(model, "metadata_encoder"):
        page = page.replace('{"images": pixels}', '{"images": pixels, "metadata": np.full((1, 2), np.nan, np.float32)}')
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(page.replace("photograph.jpg", "photograph.png"), names)
    config = data_config(model, None)
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    expected = view(read_pixels(str(tmp_path / "photograph.png")))
    np.testing.assert_allclose(names["pixels"][0], expected.numpy(), atol=0.02)  # Pillow and torch resize
    with torch.no_grad():
        logits = model(expected[None])
    assert capsys.readouterr().out.split()[0] == CLASSES[logits.argmax()]


def test_the_printed_lines_have_sizes_and_differences(exported):
    folder, _, printed = exported
    lines = re.findall(r"^(model\.\w+): ([\d.]+) MiB, logits differ by at most ([\d.e+-]+)", printed, re.MULTILINE)
    assert [name for name, *_ in lines] == FILES[:2]
    for name, size, difference in lines:
        assert float(size) == pytest.approx((folder / name).stat().st_size / 2**20, abs=0.051)
        assert float(difference) <= 1e-4


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The words that name a model of timm with a file of weights."""
    path = tmp_path_factory.mktemp("weights") / "test_vit.pth"
    torch.save(timm.create_model("test_vit").state_dict(), path)
    return ["--model", "test_vit", "--initial-checkpoint", path]


def test_programs_are_not_overwritten_unless_asked_for(exported, plain):
    folder = exported[0]
    before = (folder / "model.onnx").read_bytes()
    with pytest.raises(SystemExit, match=r"holds model.pt2, preprocessing.json already.*--force"):
        run_tool("export", *plain, "--formats", "pt2", "--output", folder)
    assert (folder / "model.onnx").read_bytes() == before


def test_a_program_that_answers_differently_is_not_left_behind(plain, tmp_path, monkeypatch):
    wrong = networks.export.FORMATS["pt2"]._replace(load=lambda path: lambda images: torch.zeros(len(images), 1000))
    monkeypatch.setattr(networks.export, "FORMATS", {"pt2": wrong})
    with pytest.raises(SystemExit, match=r"export.py: ExportError: format='pt2': its logits differ"):
        run_tool("export", *plain, "--formats", "pt2", "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gmoe_tiny_patch61"], "model='gmoe_tiny_patch61': no such model; did you mean gmoe_tiny_patch16"),
        (["gmoe_tiny_patch16"], "comes without weights; add --pretrained"),
        (["local-dir:{folder}/absent"], "CheckpointError: .*absent"),
        (["test_vit", "--initial-checkpoint", "{folder}/absent.pth"], "initial_checkpoint=.*absent.pth"),
    ],
)
def test_a_mistake_is_named_and_leaves_nothing(tmp_path, words, message):
    with pytest.raises(SystemExit, match=message):
        run_tool("export", "--model", *(word.format(folder=tmp_path) for word in words), "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
