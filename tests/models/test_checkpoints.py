"""Registered models from dense checkpoints, equal to them at first, and saved and loaded by timm."""

import dataclasses
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_model_data_config
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer

from tests.models.cases import BY_NAME, FAMILIES, SMALL, Case, mixture_layers, overlay, randomize, upcycled

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
GMOE = BY_NAME["gmoe_tiny_patch16"]


# The sizes of GMoE differ by their width alone
@pytest.mark.slow
@pytest.mark.parametrize("case", [*FAMILIES, BY_NAME["moge_small_patch32_384"]], ids=lambda case: case.name)
@torch.no_grad()
def test_at_full_size_logits_equal_the_dense_models_on_random_images_and_photographs(case: Case):
    dense = randomize(case.build_dense(), std=0.02).eval()
    mixture = case.build(**overlay(dense.state_dict(), num_classes=1000)).eval()
    mixture.pretrained_cfg.pop("state_dict")
    transform = create_transform(**resolve_model_data_config(dense), is_training=False)
    photographs = torch.stack([transform(Image.fromarray(image)) for image in load_sample_images().images])
    images = torch.cat([photographs, case.images(2, case.img_size)])
    expected = dense(images)
    assert expected.std() > 0.1  # and not the near-zero logits of a fresh classifier
    inputs = [(images,), (images, case.locations(4))] if case.metadata else [(images,)]
    for given in inputs:
        torch.testing.assert_close(mixture(*given), expected, **TOLERANCE)
    next(iter(mixture_layers(mixture).values())).experts.fc2.weight.mul_(1.1)
    assert (mixture(*inputs[-1]) - expected).abs().max() > 100 * TOLERANCE["atol"]


@torch.no_grad()
def test_experts_and_all_else_are_the_dense_weights_bit_by_bit_without_sharing_memory(case, tmp_path):
    dense = randomize(case.small_dense()).eval()
    mixture, again = upcycled(case, dense).eval(), upcycled(case, dense).eval()
    ours, theirs = mixture.state_dict(), dense.state_dict()
    layers = mixture_layers(mixture)
    for name, layer in layers.items():
        for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
            source = theirs[f"{name}.{part}"]
            assert all(torch.equal(expert, source) for expert in layer.experts.get_parameter(part)), (name, part)
            assert layer.shared is None or torch.equal(layer.shared.get_parameter(part), source)
    prefixes = tuple(f"{name}." for name in layers)
    outside = {key for key in theirs if not key.startswith(prefixes)}
    assert outside == {key for key in ours if not key.startswith((*prefixes, "metadata_encoder."))}
    assert len(outside) > 40
    assert all(torch.equal(ours[key], theirs[key]) for key in outside)
    storages = [tensor.untyped_storage().data_ptr() for tensor in ours.values()]
    assert len(set(storages)) == len(storages)
    assert not set(storages) & {tensor.untyped_storage().data_ptr() for tensor in theirs.values()}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in ours.values())
    safetensors.torch.save_file(ours, tmp_path / "model.safetensors")  # refuses shared memory
    # Routers are drawn anew at each upcycling, and nothing else
    other = again.state_dict()
    changed = {key for key in ours if not torch.equal(ours[key], other[key])}
    drawn = {key for key in ours if (".router." in key or "metadata_encoder." in key) and ours[key].ndim == 2}
    assert drawn
    assert drawn <= changed
    assert not any("experts" in key or key in outside for key in changed)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"num_experts": 1, "top_k": 1}, {"num_experts": 3, "top_k": 3}, {"moe_layers": "SSSS"}]
)
def test_upcycled_equals_dense_for_other_options_too(family, options):
    dense = randomize(family.small_dense()).eval()
    mixture, inputs = upcycled(family, dense, **options).eval(), family.inputs()
    torch.testing.assert_close(mixture(*inputs), dense(inputs[0]), **TOLERANCE)


@torch.no_grad()
def test_a_mixture_checkpoint_with_fewer_mixture_layers_is_upcycled_in_the_others():
    source = randomize(GMOE.small(moe_layers=[2])).eval()
    model = GMOE.small(moe_layers=[0, 2], **overlay(source.state_dict())).eval()
    torch.testing.assert_close(model(GMOE.images()), source(GMOE.images()), **TOLERANCE)
    assert torch.equal(model.blocks[2].mlp.router.codes, source.blocks[2].mlp.router.codes)


# Sources that differ from the model: classes, channels, image size, pooling


@pytest.fixture
def dense(family):
    """A dense model whose weights are away from their initial values."""
    return randomize(family.small_dense()).eval()


@torch.no_grad()
def test_other_classes_keep_the_features_and_draw_a_new_classifier(family, dense):
    model = family.small(**{**overlay(dense.state_dict()), "num_classes": 3}).eval()
    images = family.images()
    ours, theirs = (one.forward_head(one.forward_features(images), pre_logits=True) for one in (model, dense))
    torch.testing.assert_close(ours, theirs, **TOLERANCE)
    assert model.head.weight.shape == (3, 32)
    assert model.head.bias.count_nonzero() == 0
    headless = family.small(**{**overlay(dense.state_dict()), "num_classes": 0}).eval()
    torch.testing.assert_close(headless(images), theirs, **TOLERANCE)


@torch.no_grad()
def test_one_channel_and_another_image_size_are_adapted_as_timm_does(family, dense):
    model = family.small(in_chans=1, **overlay(dense.state_dict())).eval()
    first_conv = model.pretrained_cfg["first_conv"]
    summed = dense.get_submodule(first_conv).weight.sum(1, keepdim=True)
    torch.testing.assert_close(model.get_submodule(first_conv).weight, summed)
    size = 2 * family.small_size
    model = family.small(**{**overlay(dense.state_dict()), "img_size": size}).eval()
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(dense.pos_embed, (4, 4)))
    twin = family.small_dense(img_size=size, **overlay(dense.state_dict())).eval()
    torch.testing.assert_close(model(family.images(size=size)), twin(family.images(size=size)), **TOLERANCE)


@torch.no_grad()
def test_average_pooling_keeps_the_final_normalization(family, dense, caplog):
    with caplog.at_level(logging.WARNING):
        model = family.small(global_pool="avg", **overlay(dense.state_dict())).eval()
    assert "Unexpected keys" not in caplog.text
    assert torch.equal(model.fc_norm.weight, dense.norm.weight)
    assert torch.equal(model.fc_norm.bias, dense.norm.bias)
    # timm's order with average pooling: pool the unnormalized patch tokens, then normalize
    dense_norm, dense.norm = dense.norm, torch.nn.Identity()
    expected = dense.head(dense_norm(dense.forward_features(family.images())[:, 1:].mean(1)))
    torch.testing.assert_close(model(family.images()), expected, **TOLERANCE)
    back = family.small(**overlay(model.state_dict()))
    assert torch.equal(back.norm.weight, model.fc_norm.weight)
    assert torch.equal(back.norm.bias, model.fc_norm.bias)


@torch.no_grad()
def test_features_only_gives_the_dense_models_feature_maps(family, dense):
    options = {"features_only": True, "out_indices": (0, 2)}
    ours = family.small(**overlay(dense.state_dict()), **options).eval()
    theirs = family.small_dense(**overlay(dense.state_dict()), **options).eval()
    assert ours.feature_info.reduction() == theirs.feature_info.reduction()
    assert ours.feature_info.channels() == theirs.feature_info.channels() == [32, 32]
    for one, other in zip(ours(family.images()), theirs(family.images()), strict=True):
        assert one.shape == (3, 32, 2, 2)
        torch.testing.assert_close(one, other, **TOLERANCE)


@torch.no_grad()
def test_the_hybrids_finer_grid_uses_the_weights_of_stride_32():
    case = BY_NAME["hybrid_sfmoe_r26_s16"]
    dense = randomize(case.small_dense()).eval()
    model = case.small(output_stride=16, **overlay(dense.state_dict())).eval()
    assert model.patch_embed.grid_size == (4, 4)
    assert model.feature_info[0]["reduction"] == 16
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(dense.pos_embed, (4, 4)))
    assert torch.equal(model.patch_embed.proj.weight, dense.patch_embed.proj.weight)
    fine, coarse = (one.patch_embed.backbone(case.images()) for one in (model, dense))
    assert fine.shape[-2:] == (4, 4)
    assert coarse.shape[-2:] == (2, 2)


# Saving and loading by timm

NAMES = [*BY_NAME, "erm_le_tiny_patch16", "d3g_tiny_patch16"]
# Initialization, place, rates of a training run, and classes
NOT_RECORDED = {"weight_init", "fix_init", "device", "dtype", "embed_layer", "block_fn", "mlp_layer", "attn_layer"}
NOT_RECORDED |= {f"{rate}_rate" for rate in ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")}
OPTIONS = {"moe_layers": [1, 3], "num_experts": 4, "top_k": 3}


def saved_config(model: torch.nn.Module, folder: Path) -> dict[str, Any]:
    save_for_hf(model, folder, safe_serialization=True)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_the_architecture_is_recorded(name, tmp_path):
    size = BY_NAME[name].small_size if name in BY_NAME else 32
    model = timm.create_model(name, **{**SMALL, "img_size": size})
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
def test_a_saved_folder_gives_the_same_weights_and_logits_bit_by_bit(case, tmp_path, caplog):
    model = randomize(case.small(**OPTIONS)).eval()
    config = saved_config(model, tmp_path / "first")
    assert config["architecture"] == case.name
    assert OPTIONS.items() <= config["model_args"].items()
    assert "hf_hub_id" not in config["pretrained_cfg"]
    source = f"local-dir:{tmp_path / 'first'}"
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        again = timm.create_model(source, pretrained=True).eval()
    assert (
        caplog.messages[-1] == f"Loaded a mixture-of-experts checkpoint from {tmp_path / 'first'}: no expert upcycled."
    )
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    assert torch.equal(again(*case.inputs()), model(*case.inputs()))
    save_for_hf(again, tmp_path / "second", safe_serialization=True)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "second"))
    assert first == second
    fewer = timm.create_model(source, pretrained=True, num_classes=3).eval()
    assert torch.equal(fewer.forward_features(case.images()), model.forward_features(case.images()))
    size = 2 * case.small_size
    larger = timm.create_model(source, pretrained=True, img_size=size).eval()
    assert larger(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_what_the_caller_asks_for_at_loading_still_wins(tmp_path):
    saved_config(GMOE.small(), tmp_path)
    options = {"num_classes": 3, "drop_path_rate": 0.2, "router_noise": 0.0}
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **options).eval()
    assert again.blocks[-1].drop_path1.drop_prob == pytest.approx(0.2)
    assert saved_config(again, tmp_path / "again")["model_args"]["router_noise"] == 0.0


def test_layers_given_as_classes_and_sizes_set_afterwards_are_saved_or_left_out(tmp_path):
    model = BY_NAME["moge_tiny"].small(metadata_encoder="sincos", metadata_features=16, act_layer="relu")
    args = saved_config(model, tmp_path)["model_args"]
    assert (args["metadata_encoder"], args["metadata_features"], args["act_layer"]) == ("sincos", 16, "relu")
    assert "embed_layer" not in args
    model = GMOE.small()
    model.set_input_size(img_size=64, patch_size=8)
    model.reset_classifier(4, global_pool="avg")
    args = saved_config(model, tmp_path / "sizes")["model_args"]
    assert (args["img_size"], args["patch_size"]) == ([64, 64], 8)
    again = timm.create_model(f"local-dir:{tmp_path / 'sizes'}", pretrained=True)
    assert again.state_dict().keys() == model.state_dict().keys()


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["safetensors", "pth", None])
def test_a_file_or_state_dict_in_the_configuration_is_upcycled_and_named(tmp_path, suffix, caplog):
    case, file = BY_NAME["sfmoe_small"], tmp_path / f"dense.{suffix}"
    dense = randomize(case.small_dense()).eval()
    weights = dense.state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    given = overlay(weights)
    if suffix:
        (safetensors.torch.save_file if suffix == "safetensors" else torch.save)(weights, file)
        given = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file), "num_classes": 10}}
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        model = case.small(**given, num_experts=3).eval()
    torch.testing.assert_close(model(case.images()), dense(case.images()), **TOLERANCE)
    source = file if suffix else "the given state dict"
    assert f"Upcycled from {source}: 6 experts filled in 2 mixture layers." in caplog.messages
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[key], before[key]) for key in before)
