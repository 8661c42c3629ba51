"""Classifiers made of text embeddings: what they compute, and how they are saved."""

import json
from dataclasses import replace

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

import timm_moe_dg
from tests.load_tool import load_tool
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.layers.text_head import TextHead
from timm_moe_dg.models.text_head import use_text_head
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.protocols.options import RunOptions

CLASSES = ["a", "b", "c"]
SMALL = {"img_size": 32, "patch_size": 16, "depth": 4, "embed_dim": 32, "num_heads": 2}
CLIP, WIDTH = "vit_base_patch16_clip_224.openai", 512  # the length of its published embeddings
# What is built -> the length of the texts' embeddings, and the name under which it is saved
FORMS = {
    "CLIP": ({"model_name": CLIP}, WIDTH, "text_classifier"),
    "SigLIP": ({"model_name": "vit_base_patch16_siglip_224"}, 32, "text_classifier"),
    "GMoE on CLIP": ({"model_name": "gmoe", "backbone": CLIP, "num_experts": 3}, WIDTH, "gmoe"),
    "MoGE on CLIP": ({"model_name": "moge", "backbone": CLIP}, WIDTH, "moge"),
    "ERM+LE on CLIP": ({"model_name": "erm_le", "backbone": CLIP}, WIDTH, "erm_le"),
    "GMoE": ({"model_name": "gmoe_tiny_patch16", "num_experts": 3, "num_classes": 0}, 32, "text_classifier"),
}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SHORT = ["--model-kwargs", *(f"{name}={value}" for name, value in SMALL.items() if name != "img_size")]


def text_file(path, classes=CLASSES, width=WIDTH, **scale):
    weight = torch.randn(len(classes), width, generator=torch.Generator().manual_seed(1))
    save_file({"weight": weight, **scale}, path, {"classes": json.dumps(classes)})
    return path


@pytest.fixture(params=FORMS)
def form(request, tmp_path):
    """A network with a text head, and the name of its saved form."""
    options, width, saved_as = FORMS[request.param]
    network = timm.create_model(**options, **SMALL).eval()
    use_text_head(network, text_file(tmp_path / "texts.safetensors", width=width), CLASSES)
    return network, saved_as


def saved(network, folder, classes=CLASSES):
    save_network(network, folder, classes, data_config(network))
    return f"local-dir:{folder}"


@torch.no_grad()
def test_logits_are_scaled_cosines():
    head = TextHead(3, 5, in_features=4).double()
    features = torch.randn(7, 4, dtype=torch.float64)
    projected = features @ head.projection.weight.T + head.projection.bias
    expected = [
        [100 * (image @ text) / (image @ image * (text @ text)).sqrt() for text in head.weight] for image in projected
    ]
    assert torch.allclose(head(features), torch.tensor(expected, dtype=torch.float64), rtol=1e-7)


def test_a_text_head_is_saved_and_loaded_and_can_be_replaced(form, tmp_path):
    network, saved_as = form
    logits = network(IMAGES)
    for time in range(2):  # also what was loaded is saved
        source = saved(network, tmp_path / str(time))
        network = timm.create_model(source, pretrained=True).eval()
        assert torch.equal(network(IMAGES), logits)
    assert json.loads((tmp_path / "1" / "config.json").read_text())["architecture"] == saved_as
    assert timm.create_model(source).state_dict().keys() == network.state_dict().keys()
    assert timm.create_model(source, pretrained=True, num_classes=5)(IMAGES).shape == (2, 5)
    network.reset_classifier(4)
    source = saved(network, tmp_path / "reset", ["1", "2", "3", "4"])
    assert torch.equal(timm.create_model(source, pretrained=True).eval()(IMAGES), network(IMAGES))


def test_a_network_with_a_text_head_can_be_upcycled(tmp_path):
    network = timm.create_model(CLIP, **SMALL).eval()
    use_text_head(network, text_file(tmp_path / "texts.safetensors"), CLASSES)
    dense = network(IMAGES)
    timm_moe_dg.upcycle(network, num_experts=3)
    assert torch.allclose(network(IMAGES), dense, atol=1e-4)
    source = saved(network, tmp_path / "saved")
    assert torch.equal(timm.create_model(source, pretrained=True).eval()(IMAGES), network(IMAGES))


def test_the_length_of_the_classifier_s_input_and_the_scale_of_the_file_count(tmp_path):
    network = timm.create_model("mobilenetv3_small_100", num_classes=0).eval()
    path = text_file(tmp_path / "texts.safetensors", width=1024, logit_scale=torch.tensor(2.0))
    use_text_head(network, path, CLASSES)
    assert network(torch.randn(2, 3, 64, 64)).shape == (2, 3)
    assert network.get_classifier().logit_scale == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"freeze": "backbone"}, "--freeze backbone trains a new classifier"), ({"num_classes": 20}, "the data has 10")],
)
def test_options_that_contradict_a_text_head_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_plan(replace(RunOptions(head="text:some.safetensors"), **options))


@pytest.mark.slow
def test_a_run_trains_or_freezes_its_text_head_and_is_tied_to_the_file(tmp_path):
    digits = [str(digit) for digit in range(10)]
    path = text_file(tmp_path / "texts.safetensors", digits)
    finetune = load_tool("finetune").main
    common = ["--model", "gmoe", *SHORT, f"backbone={CLIP}", "num_experts=2", "--img-size", "32", "--head"]
    common += [f"text:{path}", "--steps", "2", "--eval-freq", "2", "-b", "4", "--workers", "0", "--output"]
    common += [str(tmp_path), "--algorithm", "CORAL", "--experiment"]
    finetune([*common, "trained", "--linear-steps", "1"])
    finetune([*common, "frozen", "--freeze", "classifier"])
    texts = load_file(path)["weight"]
    weights = {name: load_file(tmp_path / name / "best" / "model.safetensors") for name in ("trained", "frozen")}
    assert torch.equal(weights["frozen"]["head.weight"], texts)
    assert not torch.equal(weights["trained"]["head.weight"], texts)
    load_tool("evaluate").main(["--model", str(tmp_path / "trained"), "--workers", "0"])
    words = [str(tmp_path / "trained"), "--method", "wise_ft", "--alpha", "0.5", "--workers", "0", "--output"]
    load_tool("average").main([*words, str(tmp_path / "wise")])
    assert yaml.safe_load((tmp_path / "frozen" / "args.yaml").read_text())["weights_sha256"]
    text_file(path, digits, logit_scale=torch.tensor(1.0))
    with pytest.raises(SystemExit, match="started from other weights or texts under this name"):
        finetune([*common, "frozen", "--freeze", "classifier", "--steps", "3", "--resume", "auto"])
