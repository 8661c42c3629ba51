"""Any network of timm's as the dense source: equal to it at first, then a mixture in all that timm does to it."""

import copy
import json
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import Mlp
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import timm_moe_dg
from tests.models.backbones import BACKBONES, Backbone
from tests.models.cases import mixture_layers, overlay, randomize
from timm_moe_dg.errors import MoeLayersError, RouterError
from timm_moe_dg.models import upcycling
from timm_moe_dg.models.erm_le import classify_with_metadata
from timm_moe_dg.models.moge import GeoMoeVisionTransformer
from timm_moe_dg.models.upcycling import find_feed_forwards, upcycle_with_metadata

VIT = BACKBONES["Mlp"]
LARGE = ("Mlp of channels", "NormMlp", "StarReLU")  # those that cannot be built small


@pytest.fixture(params=[pytest.param(form, marks=pytest.mark.slow if form in LARGE else ()) for form in BACKBONES])
def backbone(request) -> Backbone:
    return BACKBONES[request.param]


def loaded(model: nn.Module, folder: Path) -> nn.Module:
    """A model's folder, loaded by timm."""
    save_for_hf(model, folder, safe_serialization=True)
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def rates(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Parameter name -> timm's layer-wise learning rate and weight decay."""
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(one)]: (group["lr_scale"], group["weight_decay"]) for group in groups for one in group["params"]}


@torch.no_grad()
def test_an_upcycled_network_computes_what_the_dense_one_does(backbone):
    dense = randomize(backbone.dense(), std=0.02).eval()
    expected, weights = dense(backbone.images()), copy.deepcopy(dense.state_dict())
    assert len(find_feed_forwards(dense)) == backbone.count
    mixture = timm_moe_dg.upcycle(dense, "every_two", num_experts=3)
    assert mixture is dense
    built = backbone.mixture(**overlay(weights, num_classes=4)).eval()
    assert "state_dict" not in built.pretrained_cfg
    for network in (mixture, built):
        layers = mixture_layers(network)
        assert len(layers) == (backbone.count + 1) // 2
        torch.testing.assert_close(network(backbone.images()), expected, rtol=0, atol=1e-5)
        for layer in layers.values():
            layer.fc2.weight.mul_(10)
        assert (network(backbone.images()) - expected).abs().max() > 1e-4


def test_it_is_trained_and_comes_back_from_its_folder_alone(backbone, tmp_path):
    mixture = randomize(backbone.mixture(), std=0.02).train()
    loss = mixture(backbone.images()).square().mean() + timm_moe_dg.auxiliary_loss(mixture)
    loss.backward()
    assert not [name for name, parameter in mixture.named_parameters() if parameter.grad is None]
    scales = rates(mixture)
    for name in mixture_layers(mixture):
        block = name.rpartition(".")[0]
        beside = {scales[one][0] for one in scales if one.startswith(block) and not one.startswith(name)}
        assert {scales[one][0] for one in scales if one.startswith(f"{name}.")} <= beside
        assert scales[f"{name}.experts.fc2.weight"][1] == 0.05
        assert all(scales[one][1] == 0 for one in scales if one.startswith(name) and one.endswith(("bias", "codes")))
    again = loaded(mixture.eval(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    dense = timm.get_pretrained_cfg(backbone.name)
    assert config["architecture"] == "gmoe"
    assert config["model_args"]["backbone"] == ".".join(filter(None, (backbone.name, dense.tag)))
    assert config["model_args"]["moe_layers"] == list(range(0, backbone.count, 2))
    assert config["model_args"]["top_k"] == 2
    assert tuple(config["pretrained_cfg"]["mean"]) == tuple(dense.mean)
    with torch.no_grad():
        assert torch.equal(again(backbone.images()), mixture(backbone.images()))
        for twin in (copy.deepcopy(mixture), pickle.loads(pickle.dumps(mixture))):
            assert torch.equal(twin(backbone.images()), mixture(backbone.images()))
            assert twin.no_weight_decay() == mixture.no_weight_decay()
            assert twin.no_weight_decay.args[0] is twin


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"out_indices": [0, -2]}], ids=["default", "chosen"])
@pytest.mark.parametrize("form", ["Mlp", "Mlp of windows"])
def test_feature_maps_are_the_backbones(form, options):
    backbone, options = BACKBONES[form], {**options, "features_only": True, "feature_cls": "getter"}
    options |= overlay(randomize(backbone.dense()).state_dict(), 4)
    dense, mixture = backbone.dense(**options).eval(), backbone.mixture(**options).eval()
    assert mixture.feature_info.channels() == dense.feature_info.channels()
    assert mixture_layers(mixture)
    for ours, theirs in zip(mixture(backbone.images()), dense(backbone.images()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["poolformer_s12", "pit_ti_224", "csatv2"])
def test_networks_without_layer_groups_keep_those_that_timm_counts(name):
    with torch.device("meta"):
        network, mixture = timm.create_model(name), timm_moe_dg.upcycle(timm.create_model(name), "every_two")
    network.no_weight_decay = set
    dense, scales = ({key: rate for key, (rate, _) in rates(model).items()} for model in (network, mixture))
    for key, scale in scales.items():
        block = key.partition(".mlp.")[0]  # of experts and routers
        beside = {dense[other] for other in dense if other.startswith(f"{block}.mlp.")}
        assert scale == dense[key] if key in dense else scale in beside


# Padding


def naflex(**options: Any) -> nn.Module:
    size = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": [0, 1], "num_experts": 3}
    still = {"capacity_factor": 0.7, "router_noise": 0.0, "expert_drop": 0.0, "num_classes": 4}
    torch.manual_seed(0)
    return randomize(timm.create_model("gmoe", backbone="naflexvit_base_patch16_gap", **size, **still, **options))


def naflex_batch(length: int) -> dict[str, Tensor]:
    """Two images of 6 and 9 patches, padded to a length."""
    generator = torch.Generator().manual_seed(0)
    patches, valid = torch.zeros(2, length, 48), torch.zeros(2, length, dtype=torch.bool)
    coordinates = torch.zeros(2, length, 2, dtype=torch.long)
    for row, (height, width) in enumerate([(2, 3), (3, 3)]):
        count = height * width
        patches[row, :count] = torch.randn(count, 48, generator=generator)
        coordinates[row, :count] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        valid[row, :count] = True
    return {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}


@pytest.mark.parametrize("options", [{}, {"use_key_only_attn_mask": True}], ids=["symmetric", "keys alone"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_of_naflex_batches_is_neither_routed_nor_counted(options, checkpointing):
    model = naflex(**options).train()
    model.set_grad_checkpointing(checkpointing)
    results = []
    for length in (9, 30):
        model.zero_grad()
        logits, loss = model(naflex_batch(length)), timm_moe_dg.auxiliary_loss(model)
        routings = [layer.routing for layer in mixture_layers(model).values()]
        counts = [int(routing.dropped.sum()) for routing in routings]
        (logits.square().sum() + loss).backward()
        results.append((logits, loss, [parameter.grad for parameter in model.parameters()], torch.tensor(counts)))
        assert [int(routing.routed.sum()) for routing in routings] == [15 + 2 * model.num_prefix_tokens] * 2
    assert results[0][-1].gt(0).all()
    torch.testing.assert_close(*results)
    model(torch.randn(2, 3, 8, 8))  # images of one size have no padding
    assert all(layer.routing.routed is None for layer in mixture_layers(model).values())


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (2, 1, 6, 6), (2, 2, 6, 6), (2, 1, 1, 6), (1, 1, 6, 6)])
@pytest.mark.parametrize("boolean", [False, True])
def test_padding_is_told_by_masks_of_every_form(shape, boolean):
    model = naflex().eval()
    allowed = (torch.arange(6) < 4).expand(shape)
    mask = allowed if boolean else torch.zeros(shape).masked_fill(~allowed, -torch.inf)
    layer = model.blocks[0].mlp
    layer.record_routing = True
    model.blocks[0](torch.randn(2, 6, 24), attn_mask=mask)
    assert layer.routing.routed.view(2, 6).tolist() == [[True] * 4 + [False] * 2] * 2


# Loading


@torch.no_grad()
def test_positions_channels_and_classes_are_adapted_in_dense_and_in_mixture_checkpoints(tmp_path):
    dense = randomize(VIT.dense()).eval()
    given = {"img_size": 64, "in_chans": 1, "num_classes": 3}
    theirs = VIT.dense(**{**given, **overlay(dense.state_dict(), num_classes=4)}).eval()
    ours = VIT.mixture(**{**given, **overlay(dense.state_dict(), num_classes=4)}).eval()
    images = torch.randn(2, 1, 64, 64)
    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), rtol=0, atol=1e-5)
    save_for_hf(VIT.mixture(**overlay(dense.state_dict(), num_classes=4)), tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **given).eval()
    torch.testing.assert_close(again.forward_features(images), theirs.forward_features(images), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_mixtures_weights_are_loaded_without_a_warning_about_the_dense_ones(tmp_path):
    with pytest.warns(UserWarning, match="top_k=2 with combine weights"):
        mixture = randomize(VIT.mixture(normalize_weights=False)).eval()
    save_file(mixture.state_dict(), tmp_path / "mixture.safetensors")
    file = {"file": str(tmp_path / "mixture.safetensors"), "num_classes": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = VIT.mixture(pretrained=True, pretrained_cfg_overlay=file, normalize_weights=False).eval()
    assert torch.equal(again(VIT.images()), mixture(VIT.images()))


@torch.no_grad()
def test_a_network_upcycled_by_hand_is_saved_and_loaded_like_one_of_timms(tmp_path):
    mixture = timm_moe_dg.upcycle(VIT.dense(), moe_layers=[1], router="linear", top_k=3, num_experts=5).eval()
    assert torch.equal(loaded(mixture, tmp_path)(VIT.images()), mixture(VIT.images()))
    assert timm.create_model("gmoe.deit_in1k", device="meta").mixture_args["backbone"].endswith(".fb_in1k")


# Which feed-forwards


def test_layers_that_share_weights_share_their_mixture():
    first = Mlp(8, 16)
    network = nn.Sequential(OrderedDict(one=first, other=Mlp(8, 16), again=first))
    timm_moe_dg.upcycle(network, [0], num_experts=2)
    assert network.one is network.again
    assert type(network.other) is Mlp


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("mixer_s32_224", "mlp_tokens"),
        ("tnt_s_patch16_224", "mlp_in"),
        ("swinv2_cr_tiny_224", "meta_mlp"),
        ("vit_relpos_small_patch16_224", "rel_pos.mlp"),
        ("vit_base_patch16_siglip_224", "attn_pool.mlp"),
    ],
)
def test_modules_of_a_known_class_that_are_no_feed_forward_stay(name, never):
    model = timm.create_model(name, device="meta")
    assert [one for one, _ in model.named_modules() if one.endswith(never)]
    assert not [one for one in find_feed_forwards(model) if one.endswith(never)]


class Twice(Mlp):
    """A subclass may compute anything."""


def test_feed_forwards_are_counted_as_the_network_has_them():
    dense = VIT.dense()
    dense.blocks[0].mlp = Twice(48, 192)
    for moe_layers, chosen in (([1], 1), ("FFS", 2), ("every_two", 2)):
        mixture = timm_moe_dg.upcycle(copy.deepcopy(dense), moe_layers)
        assert list(mixture_layers(mixture)) == [f"blocks.{chosen}.mlp"]
        assert mixture.mixture_args["moe_layers"] == [chosen]
    for moe_layers in ([0], [0, 2], "SFF"):
        with pytest.raises(MoeLayersError, match=r"^moe_layers=.*blocks\.0\.mlp cannot .*mlp='Twice'.*among 1, 2"):
            timm_moe_dg.upcycle(dense, moe_layers)
    assert not mixture_layers(dense)


def test_a_class_that_timm_changes_is_noticed(monkeypatch):
    model = VIT.dense()
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.fc2(self.act(self.fc1(x))) - x.mean(1, keepdim=True))
    with pytest.raises(RouterError, match=r"^mlp='Mlp': computes"):
        timm_moe_dg.upcycle(model)
    assert type(model.blocks[0].mlp) is Mlp


def test_drawing_and_probing_leave_the_random_state_of_the_rest_alone(monkeypatch):
    torch.manual_seed(0)
    first = timm_moe_dg.upcycle(VIT.dense(), num_experts=2).state_dict()
    monkeypatch.setattr(upcycling, "check_token_wise", lambda chosen: None)
    torch.manual_seed(0)
    second = timm_moe_dg.upcycle(VIT.dense(), num_experts=2).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


# Metadata routing on plain vision transformers

_PLAIN = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3, "patch_size": 16}
PLAIN = {
    "vit_base_patch16_clip_quickgelu_224": _PLAIN,  # normalized before the blocks
    "vit_giant_patch14_reg4_dinov2": _PLAIN,  # gated feed-forwards, layer scale, registers
    "vit_base_patch16_siglip_224": _PLAIN,  # no class token, pooled by attention
    "vit_base_patch32_plus_256": {**_PLAIN, "global_pool": "avg"},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 3},  # convolutions in front
}
PLACES = torch.tensor([[10.0, 20.0], [float("nan"), 20.0], [-120.0, -33.0]])
KNOWN = ~PLACES.isnan().any(dim=1)


@pytest.fixture(params=PLAIN)
def name(request) -> str:
    return request.param


def placed(name: str, **kwargs: Any) -> nn.Module:
    options = {"num_classes": 4, "moe_layers": [0, 2], "num_experts": 4, "top_k": 2, "metadata_drop": 0.0}
    return timm.create_model("moge", backbone=name, **{**options, **PLAIN[name], **kwargs})


def images_for(name: str) -> Tensor:
    size = PLAIN[name]["img_size"]
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_with_metadata_and_without_it_computes_what_the_dense_one_does_until_its_experts_differ(name):
    dense, images = randomize(timm.create_model(name, num_classes=4, **PLAIN[name]), std=0.02).eval(), images_for(name)
    expected, weights = dense(images), copy.deepcopy(dense.state_dict())
    model = upcycle_with_metadata(dense, [0, 2], num_experts=4, top_k=2)
    assert model is dense
    assert len(mixture_layers(model)) == 2
    assert not any(module.training for module in model.modules())  # the encoder too, which drops metadata in training
    built = placed(name, **overlay(weights, num_classes=4)).eval()
    for logits in (model(images, PLACES), model(images), built(images, PLACES)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for layer in mixture_layers(model).values():
        layer.fc2.weight.mul_(torch.linspace(5, 10, 4).view(-1, 1, 1))
    moved = (model(images, PLACES) - expected).abs().amax(dim=1)
    assert (moved[KNOWN] > 1e-4).all()
    assert (moved[~KNOWN] < 1e-5).all()
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)


def test_a_network_with_metadata_is_trained_and_comes_back_from_its_folder_alone(name, tmp_path):
    model, images = randomize(placed(name), std=0.02), images_for(name)
    model(images, PLACES).square().mean().backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]
    exempt = {key for key, _ in model.named_parameters() if key.endswith((".experts.fc1.bias", ".codes", ".mlp.gamma"))}
    assert exempt
    assert exempt <= model.no_weight_decay()
    again = loaded(model.eval(), tmp_path)
    args = json.loads((tmp_path / "config.json").read_text())
    assert args["architecture"] == "moge"
    assert args["model_args"]["backbone"].partition(".")[0] == name
    assert args["model_args"]["moe_layers"] == [0, 2]
    assert args["model_args"]["metadata_encoder"] == "spherical_harmonics"
    assert type(again) is GeoMoeVisionTransformer
    with torch.no_grad():
        for twin in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(images, PLACES), model(images, PLACES))


@torch.no_grad()
def test_a_classifier_with_metadata_takes_the_dense_features_and_comes_back_from_its_folder_alone(name, tmp_path):
    dense, images = randomize(timm.create_model(name, num_classes=4, **PLAIN[name]), std=0.02).eval(), images_for(name)
    features = dense.forward_head(dense.forward_features(images), pre_logits=True)
    weights, context = copy.deepcopy(dense.state_dict()), torch.zeros(3, 256)
    built = timm.create_model("erm_le", backbone=name, **PLAIN[name], **overlay(weights, num_classes=4)).eval()
    for model in (built, classify_with_metadata(dense)):
        assert not any(module.training for module in model.modules())
        context[KNOWN] = model.metadata_encoder.encoder(PLACES[KNOWN])
        hidden = nn.functional.gelu(model.fuse(torch.cat([features, context], dim=1)))
        expected = nn.functional.linear(hidden, weights["head.weight"], weights["head.bias"])
        torch.testing.assert_close(model(images, PLACES), expected, rtol=0, atol=1e-5)
    again = loaded(built, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "erm_le"
    own = overlay(built.state_dict(), num_classes=4)
    given = timm.create_model("erm_le", backbone=name, **PLAIN[name], **own).eval()
    for twin in (again, given, copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(twin(images, PLACES), built(images, PLACES))
    others = timm.create_model("erm_le", backbone=name, **PLAIN[name], **own, num_classes=7)
    assert torch.equal(others.fuse.weight, built.fuse.weight)


@torch.no_grad()
def test_the_coverage_and_further_columns_are_saved_with_it(tmp_path):
    clip, images = "vit_base_patch16_clip_quickgelu_224", images_for("vit_base_patch16_clip_quickgelu_224")
    covered, columns = placed(clip), placed(clip, metadata_columns={"height": [100.0, 50.0]})
    covered.set_coverage(torch.tensor([[10.0, 20.0], [12.0, 21.0]]))
    covered.set_coverage_radius(500.0)
    for model, rows in ((covered, PLACES), (columns, torch.cat([PLACES, torch.tensor([[90.0], [0.0], [9.0]])], dim=1))):
        again = loaded(randomize(model, std=0.02).eval(), tmp_path / str(rows.shape[1]))
        assert torch.equal(again(images, rows), model(images, rows))
        assert again.metadata_encoder.coverage is None or again.metadata_encoder.coverage.radius == 500.0
        assert not torch.allclose(model(images, rows)[0], model(images)[0])
    assert torch.equal(covered(images, PLACES)[2], covered(images)[2])  # too far
    assert not torch.equal(columns(images, rows)[1], columns(images)[1])  # its height is known
