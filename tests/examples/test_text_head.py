"""examples/text_head.py, and the logits of its file beside those of CLIP's own code."""

import sys

import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.load_tool import load_example
from timm_moe_dg.models.text_head import use_text_head

CLASSES = ["dog", "house_plant", "zebra"]
VISION = {"image_size": 32, "patch_size": 16, "width": 64, "layers": 2, "head_width": 32}
TEXT = {"width": 32, "heads": 2, "layers": 1}


@pytest.fixture
def clip(monkeypatch):
    """A small CLIP of open_clip's, with random weights, which the script gets."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    model = open_clip.CLIP(24, VISION, TEXT, quick_gelu=True).eval().double()  # so that rounding hides no difference
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    monkeypatch.setattr(open_clip, "create_model", lambda name, pretrained: model)
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda name: open_clip.tokenize)
    return model


def write(*words):
    load_example("text_head").main(words)


@pytest.mark.parametrize("model", ["vit_base_patch16_clip_quickgelu_224", "gmoe"])
@torch.no_grad()
def test_logits_equal_those_of_open_clip(model, clip, tmp_path):
    path = tmp_path / "texts.safetensors"
    write("--model", "any", "--pretrained", "any", "--classes", *CLASSES, "--output", str(path))
    backbone = {"backbone": "vit_base_patch16_clip_quickgelu_224"} if model == "gmoe" else {}
    size = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 24}
    weights = {"pretrained_cfg_overlay": {"state_dict": clip.state_dict(), "num_classes": 24}}
    network = timm.create_model(model, pretrained=True, **size, **weights, **backbone).eval().double()
    use_text_head(network, path, CLASSES)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    tokens = sys.modules["open_clip"].tokenize(
        ["a photo of a dog.", "a photo of a house plant.", "a photo of a zebra."]
    )
    expected = clip.get_logits(images, tokens)[0]
    assert torch.allclose(network(images), expected, rtol=0, atol=1e-6)  # the file has float32
    assert expected.std() > 0.1  # of different images and texts


@torch.no_grad()
def test_several_templates_are_averaged(clip, tmp_path):
    path = tmp_path / "texts.safetensors"
    words = ["--classes", "dog", "--templates", "a {}", "the {}."]
    write("--model", "any", "--pretrained", "any", *words, "--output", str(path))
    embeddings = clip.encode_text(sys.modules["open_clip"].tokenize(["a dog", "the dog."]))
    expected = sum(embedding / embedding.square().sum().sqrt() for embedding in embeddings) / 2
    network = timm.create_model("vit_tiny_patch16_224", num_classes=24).double()
    use_text_head(network, path, ["dog"])
    assert torch.allclose(network.head.weight[0], expected, atol=1e-6)
    assert network.head.logit_scale == clip.logit_scale


@pytest.mark.parametrize("template", ["a photo", "a {name}", "{} and {}"])
def test_templates_have_one_place_for_the_class(template):
    with pytest.raises(SystemExit, match="where the class belongs"):
        write("--model", "a", "--pretrained", "b", "--classes", "dog", "--templates", template, "--output", "x")
