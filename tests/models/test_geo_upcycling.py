"""Metadata routing on timm's plain vision transformers: equal to the dense network at first, then a MoGE."""

import copy
import json
import pickle

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from tests.models.cases import mixture_layers, overlay, randomize
from timm_moe_dg.errors import CheckpointError, MetadataError, MoeLayersError, OptionError, RouterError
from timm_moe_dg.models.moge import GeoMoeVisionTransformer
from timm_moe_dg.models.upcycling import upcycle_with_metadata

_VIT = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3, "patch_size": 16}
NETWORKS = {
    "vit_base_patch16_clip_quickgelu_224": _VIT,  # normalized before the blocks
    "vit_giant_patch14_reg4_dinov2": _VIT,  # gated feed-forwards, layer scale, registers
    "vit_base_patch16_siglip_224": _VIT,  # no class token, pooled by attention
    "vit_base_patch32_plus_256": {**_VIT, "global_pool": "avg"},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 3},  # convolutions in front
}
CLIP = "vit_base_patch16_clip_quickgelu_224"
PLACES = torch.tensor([[10.0, 20.0], [float("nan"), 20.0], [-120.0, -33.0]])
KNOWN = ~PLACES.isnan().any(dim=1)


@pytest.fixture(params=NETWORKS)
def name(request) -> str:
    torch.manual_seed(0)
    return request.param


def dense_network(name: str, **kwargs: object) -> nn.Module:
    return timm.create_model(name, **{"num_classes": 4, **NETWORKS[name], **kwargs})


def mixture(name: str, **kwargs: object) -> nn.Module:
    options = {"num_classes": 4, "moe_layers": [0, 2], "num_experts": 4, "top_k": 2, "metadata_drop": 0.0}
    return timm.create_model("moge", backbone=name, **{**options, **NETWORKS[name], **kwargs})


def images_for(name: str) -> Tensor:
    size = NETWORKS[name]["img_size"]
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_with_metadata_and_without_it_computes_what_the_dense_one_does_until_its_experts_differ(name):
    dense, images = randomize(dense_network(name), std=0.02).eval(), images_for(name)
    expected = dense(images)
    model = upcycle_with_metadata(dense, [0, 2], num_experts=4, top_k=2)
    assert model is dense
    assert len(mixture_layers(model)) == 2
    assert not any(module.training for module in model.modules())  # the encoder too, which drops metadata in training
    for logits in (model(images, PLACES), model(images)):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for layer in mixture_layers(model).values():
        layer.fc2.weight.mul_(torch.linspace(5, 10, 4).view(-1, 1, 1))
    moved = (model(images, PLACES) - expected).abs().amax(dim=1)
    assert (moved[KNOWN] > 1e-4).all()
    assert (moved[~KNOWN] < 1e-5).all()
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_saved_mixture_comes_back_from_its_folder_alone(name, tmp_path):
    model, images = randomize(mixture(name), std=0.02).eval(), images_for(name)
    save_for_hf(model, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "moge"
    assert config["model_args"]["backbone"].partition(".")[0] == name
    assert config["model_args"]["moe_layers"] == [0, 2]
    assert config["model_args"]["metadata_encoder"] == "spherical_harmonics"
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert type(again) is GeoMoeVisionTransformer
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(again(images, PLACES), model(images, PLACES))


def test_every_parameter_gets_a_gradient_and_those_of_experts_and_codes_take_no_decay(name):
    model = mixture(name).train()
    model(images_for(name), PLACES).square().mean().backward()
    assert not [key for key, parameter in model.named_parameters() if parameter.grad is None]
    exempt = {
        key for key in dict(model.named_parameters()) if key.endswith((".experts.fc1.bias", ".codes", ".mlp.gamma"))
    }
    assert exempt
    assert exempt <= model.no_weight_decay()


@pytest.mark.slow
@pytest.mark.parametrize("name", [CLIP, "vit_base_patch16_siglip_224"])
@torch.no_grad()
def test_copies_pickles_and_programs_answer_alike(name):
    model, images = randomize(mixture(name), std=0.02).eval(), images_for(name)
    expected = model(images, PLACES)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images, PLACES), expected)
    program = torch.export.export(model, (images, PLACES)).module()
    torch.testing.assert_close(program(images, PLACES), expected)


@torch.no_grad()
def test_dense_weights_are_loaded_by_timm_and_upcycled(name):
    dense = randomize(dense_network(name), std=0.02).eval()
    model = mixture(name, **overlay(dense.state_dict(), num_classes=4)).eval()
    torch.testing.assert_close(model(images_for(name), PLACES), dense(images_for(name)), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_mixtures_own_file_is_loaded_and_one_without_its_encoder_refused(tmp_path):
    model = randomize(mixture(CLIP)).eval()
    save_file(model.state_dict(), tmp_path / "mixture.safetensors")
    given = {
        "pretrained": True,
        "pretrained_cfg_overlay": {"file": str(tmp_path / "mixture.safetensors"), "num_classes": 4},
    }
    images = images_for(CLIP)
    assert torch.equal(mixture(CLIP, **given).eval()(images, PLACES), model(images, PLACES))
    rest = {key: value for key, value in model.state_dict().items() if not key.startswith("metadata_encoder.")}
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint.*metadata_encoder"):
        mixture(CLIP, **overlay(rest, num_classes=4))


@torch.no_grad()
def test_perturbed_experts_differ_and_the_shared_one_does_not():
    dense = randomize(dense_network(CLIP)).eval()
    copied, scale = dense.blocks[0].mlp.fc1.weight.clone(), dense.blocks[0].mlp.fc1.weight.std()
    layer = upcycle_with_metadata(dense, [0], expert_perturbation=0.1).blocks[0].mlp
    assert torch.equal(layer.shared.fc1.weight, copied)
    assert 0.08 * scale < (layer.fc1.weight - copied).std() < 0.12 * scale
    torch.testing.assert_close(dense(images_for(CLIP)), dense(images_for(CLIP), PLACES * float("nan")))


@pytest.mark.parametrize(
    ("backbone", "error", "reason"),
    [
        ("convnext_tiny", MoeLayersError, "is of class ConvNeXt, which would not hand metadata on.*model 'gmoe'"),
        ("eva02_tiny_patch14_224", MoeLayersError, "is of class Eva"),
        ("deit_tiny_distilled_patch16_224", MoeLayersError, "is of class VisionTransformerDistilled"),
        ("vit_small_patch16_18x2_224", MoeLayersError, "has blocks of class ParallelThingsBlock"),
        ("vitamin_small_224", RouterError, "mlp='GeGluMlp'.*without a normalization of its input"),
    ],
)
def test_a_network_that_would_not_hand_metadata_on_is_refused_and_left_alone(backbone, error, reason):
    model = timm.create_model(backbone, device="meta")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error, match=reason):
        upcycle_with_metadata(model)
    assert [type(module) for module in model.modules()] == kinds


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"moe_layers": [3]}, MoeLayersError, r"moe_layers=\[3\]: .*0 to 2"),
        ({"metadata_encoder": "tiles"}, MetadataError, "metadata_encoder='tiles': choose one of"),
        ({"router": "cosine"}, OptionError, "router.*own options are moe_layers.*metadata_encoder"),
        ({"top_k": 5}, RouterError, "top_k=5: choose 1 to"),
    ],
)
def test_bad_options_are_named_with_what_would_work(options, error, message):
    with pytest.raises(error, match=message):
        mixture(CLIP, **options)


@torch.no_grad()
def test_what_it_was_trained_near_and_further_columns_are_saved_with_it(tmp_path):
    near, images = torch.tensor([[10.0, 20.0], [12.0, 21.0]]), images_for(CLIP)
    covered, columns = mixture(CLIP), mixture(CLIP, metadata_columns={"height": [100.0, 50.0]})
    covered.set_coverage(near)
    covered.set_coverage_radius(500.0)
    for model, rows in ((covered, PLACES), (columns, torch.cat([PLACES, torch.tensor([[90.0], [0.0], [9.0]])], dim=1))):
        randomize(model, std=0.02).eval()
        save_for_hf(model, tmp_path / str(rows.shape[1]), safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / str(rows.shape[1])}", pretrained=True).eval()
        assert torch.equal(again(images, rows), model(images, rows))
        assert again.metadata_encoder.coverage is None or again.metadata_encoder.coverage.radius == 500.0
        assert not torch.allclose(model(images, rows)[0], model(images)[0])
    assert torch.equal(covered(images, PLACES)[2], covered(images)[2])  # too far
    assert not torch.equal(columns(images, rows)[1], columns(images)[1])  # its height is known
