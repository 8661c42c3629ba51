"""Saving and loading by timm: configurations with every option, folders, files and state dicts."""

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
from timm_moe_dg.models._geo_vit import GeoMoeVisionTransformer
from timm_moe_dg.models._moe_vit import MoeVisionTransformer
from timm_moe_dg.models.erm_le import LocationVisionTransformer
from timm_moe_dg.networks.build import build_network

NAMES = [*BY_NAME, "erm_le_tiny_patch16"]
OURS = {"num_experts", "top_k", "router_noise", "expert_drop", "moe_layers"}


def small(name, **kwargs):
    size = BY_NAME[name].small_size if name in BY_NAME else 32
    return randomize(timm.create_model(name, **{**SMALL, "img_size": size, **kwargs})).eval()


def images(name):
    return (BY_NAME[name] if name in BY_NAME else CASES[0]).images()


def saved_config(model, folder):
    save_for_hf(model, folder, safe_serialization=True)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_what_the_caller_left_to_the_name_is_recorded_too(name, tmp_path):
    args = saved_config(small(name), tmp_path)["model_args"]
    assert args["patch_size"] == {"hybrid_sfmoe_r26_s16": 1, "moge_small_patch32_384": 32}.get(name, 16)
    assert {"embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "class_token", "reg_tokens"} <= args.keys()
    if name != "erm_le_tiny_patch16":
        assert args.keys() >= OURS
        assert args["top_k"] == (3 if name.startswith("moge") else 2)
    if name.startswith(("moge", "erm_le")):
        assert args["metadata_encoder"] in ("spherical_harmonics", "location_id")
        assert {"metadata_drop", "metadata_features", "num_locations"} <= args.keys()
    else:
        assert args["router"] == ("cosine" if name.startswith("gmoe") else "linear")
    assert not {"weight_init", "fix_init", "device", "dtype", "drop_path_rate", "drop_rate"} & args.keys()


def change_defaults(monkeypatch, cls, changes):
    """Lets a class, and with it each name that leaves these options to it, have other defaults than today."""
    original = cls.__init__
    signature = inspect.signature(original)
    kinds = {
        name: parameter.replace(default=changes.get(name, parameter.default))
        for name, parameter in signature.parameters.items()
    }

    def changed(self, *args, **kwargs):
        original(self, *args, **{**changes, **kwargs})

    changed.__signature__ = signature.replace(parameters=list(kinds.values()))
    monkeypatch.setattr(cls, "__init__", changed)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_reloads_after_every_default_changed(name, tmp_path, monkeypatch):
    model = small(name)
    save_for_hf(model, tmp_path, safe_serialization=True)
    entrypoints = timm.models._registry._model_entrypoints
    today = entrypoints[name]
    changes = {"num_experts": 4, "top_k": 1, "moe_layers": "every_two", "router": "linear", "expert_drop": 0.3}
    changes |= {
        "patch_size": 2 if name.startswith("hybrid") else 8,
        "embed_dim": 48,
        "depth": 6,
        "metadata_encoder": "sincos",
    }
    known = set(json.loads((tmp_path / "config.json").read_text())["model_args"])
    tomorrow = {key: value for key, value in changes.items() if key in known}
    monkeypatch.setitem(
        entrypoints, name, lambda pretrained=False, **kwargs: today(pretrained, **{**tomorrow, **kwargs})
    )
    for cls, other in (
        (VisionTransformer, {"mlp_ratio": 2.0, "qkv_bias": False, "reg_tokens": 2, "pre_norm": True}),
        (MoeVisionTransformer, {"normalize_weights": False, "capacity_factor": 0.5, "router_noise": 3.0}),
        (GeoMoeVisionTransformer, {"metadata_features": 12, "num_locations": 7}),
        (LocationVisionTransformer, {"metadata_features": 12}),
    ):
        change_defaults(monkeypatch, cls, other)
    assert len(timm.create_model(name, img_size=64, num_heads=2).blocks) == 6  # the change is real

    source = f"local-dir:{tmp_path}"
    for again in (timm.create_model(source, pretrained=True).eval(), build_network(source, 10, pretrained=True).eval()):
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
        assert torch.equal(again(images(name)), model(images(name)))
        assert not any(getattr(module, "capacity_factor", None) for module in again.modules())


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
