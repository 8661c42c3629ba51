"""Saving and loading by timm: configurations with every option, folders, files and state dicts."""

import dataclasses
import inspect
import json
import logging

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer

from tests.models.cases import BY_NAME, CASES, SMALL, overlay, randomize

NAMES = [*BY_NAME, "erm_le_tiny_patch16", "d3g_tiny_patch16"]
# Initialization, place, rates of a training run, and classes
NOT_RECORDED = {"weight_init", "fix_init", "device", "dtype", "embed_layer", "block_fn", "mlp_layer", "attn_layer"}
NOT_RECORDED |= {f"{rate}_rate" for rate in ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")}


def small(name, **kwargs):
    size = BY_NAME[name].small_size if name in BY_NAME else 32
    return randomize(timm.create_model(name, **{**SMALL, "img_size": size, **kwargs})).eval()


def images(name):
    return (BY_NAME[name] if name in BY_NAME else CASES[0]).images()


def saved_config(model, folder):
    save_for_hf(model, folder, safe_serialization=True)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_the_architecture_is_recorded(name, tmp_path):
    model = small(name)
    args = saved_config(model, tmp_path)["model_args"]
    expected = {}
    for cls in reversed(type(model).__mro__[: type(model).__mro__.index(VisionTransformer) + 1]):
        parameters = inspect.signature(cls.__init__).parameters.values()
        expected |= {item.name: item.default for item in parameters if item.default is not item.empty}
        for options in vars(cls).get("option_classes", ()):
            expected |= {field.name: field.default for field in dataclasses.fields(options)}
    assert set(expected) - set(args) == NOT_RECORDED
    assert args["patch_size"] == {"hybrid_sfmoe_r26_s16": 1, "moge_small_patch32_384": 32}.get(name, 16)
    if name.startswith("moge"):
        assert (args["top_k"], args["num_locations"]) == (3, 323)
        assert args["metadata_encoder"] == ("spherical_harmonics" if name == "moge_tiny" else "location_id")
    elif not name.startswith(("erm_le", "d3g")):
        assert (args["top_k"], args["router"]) == (2, "cosine" if name.startswith("gmoe") else "linear")


@torch.no_grad()
def test_what_the_caller_asks_for_at_loading_still_wins(tmp_path):
    model = small("gmoe_tiny_patch16")
    save_for_hf(model, tmp_path, safe_serialization=True)
    source = f"local-dir:{tmp_path}"
    again = timm.create_model(source, pretrained=True, num_classes=3, drop_path_rate=0.2, router_noise=0.0).eval()
    assert again.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    assert again(images("gmoe_tiny_patch16")).shape == (3, 3)
    assert saved_config(again, tmp_path / "again")["model_args"]["router_noise"] == 0.0


def test_layers_given_as_classes_do_not_keep_a_model_from_being_saved(tmp_path):
    model = small("moge_tiny", metadata_encoder="sincos", metadata_features=16, act_layer="relu")
    args = saved_config(model, tmp_path)["model_args"]
    assert (args["metadata_encoder"], args["metadata_features"], args["act_layer"]) == ("sincos", 16, "relu")
    assert "embed_layer" not in args


def test_a_size_set_afterwards_is_the_one_that_is_saved(tmp_path):
    model = small("gmoe_tiny_patch16")
    model.set_input_size(img_size=64, patch_size=8)
    model.reset_classifier(4, global_pool="avg")
    args = saved_config(model, tmp_path)["model_args"]
    assert (args["img_size"], args["patch_size"]) == ([64, 64], 8)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert again.state_dict().keys() == model.state_dict().keys()


OPTIONS = {"moe_layers": [1, 3], "num_experts": 4, "top_k": 3}


@torch.no_grad()
def test_a_saved_folder_gives_the_same_weights_and_logits_bit_by_bit(case, tmp_path):
    model = randomize(case.small(**OPTIONS)).eval()
    config = saved_config(model, tmp_path / "first")
    assert config["architecture"] == case.name
    assert OPTIONS.items() <= config["model_args"].items()
    assert "hf_hub_id" not in config["pretrained_cfg"]
    again = timm.create_model(f"local-dir:{tmp_path / 'first'}", pretrained=True).eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    assert torch.equal(again(*case.inputs()), model(*case.inputs()))
    save_for_hf(again, tmp_path / "second", safe_serialization=True)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "second"))
    assert first == second


@torch.no_grad()
@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_saved_folder_can_be_fine_tuned_for_other_classes_and_sizes(name, tmp_path):
    case = BY_NAME[name]
    model = randomize(case.small(**OPTIONS)).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3).eval()
    tokens = again.forward_features(case.images())
    assert torch.equal(tokens, model.forward_features(case.images()))
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=64).eval()
    assert torch.equal(larger.blocks[1].mlp.experts.fc1.weight, model.blocks[1].mlp.experts.fc1.weight)
    assert larger(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_file_named_in_the_configuration_is_upcycled_and_logged(tmp_path, suffix, caplog):
    case = BY_NAME["sfmoe_small"]
    dense = randomize(case.small_dense()).eval()
    file = tmp_path / f"dense.{suffix}"
    save = safetensors.torch.save_file if suffix == "safetensors" else torch.save
    save(dense.state_dict(), file)
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        cfg = {"file": str(file), "num_classes": 10}
        model = case.small(pretrained=True, pretrained_cfg_overlay=cfg, num_experts=3).eval()
    torch.testing.assert_close(model(case.images()), dense(case.images()), rtol=0, atol=1e-5)
    assert f"Upcycled from {file}: 6 experts filled in 2 mixture layers." in caplog.messages


def test_a_state_dict_in_the_configuration_is_named_as_such_and_left_as_it_was(caplog):
    case = BY_NAME["gmoe_tiny_patch16"]
    weights = case.small_dense().state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        case.small(**overlay(weights))
    assert caplog.messages[-1] == "Upcycled from the given state dict: 12 experts filled in 2 mixture layers."
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[key], before[key]) for key in before)


def test_loading_a_mixture_says_that_nothing_was_upcycled(caplog, tmp_path):
    model = BY_NAME["gmoe_tiny_patch16"].small()
    save_for_hf(model, tmp_path, safe_serialization=True)
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert caplog.messages[-1] == f"Loaded a mixture-of-experts checkpoint from {tmp_path}: no expert upcycled."
