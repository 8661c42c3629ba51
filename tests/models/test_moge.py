"""MoGE models: predictions with metadata, without, beyond the training coordinates, and in each expert mode.

The reference recomputes the mixture layers image by image from the weights, in float64.
"""

import json
import math
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import timm_moe_dg
from tests.models.cases import BY_NAME, mixture_layers, overlay, randomize, upcycled
from timm_moe_dg.errors import CheckpointError, MetadataError
from timm_moe_dg.layers.encoders.coverage import CELL_RADIUS
from timm_moe_dg.losses import reported_losses
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.trained import load_trained

COORDINATES = BY_NAME["moge_tiny"]
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}
PLACES = torch.tensor([[10.0, 50.0], [-120.0, 30.0], [100.0, -20.0], [0.0, 0.0], [179.0, 80.0]])


def one_image(layer: Any, x: Tensor, embedding: Tensor | None, forced: int | None) -> Tensor:
    """The layer by its equation, g f0(x) + (1 - g) sum_k alpha_k f_k(x), alpha the softmax of the K best s_k / tau."""
    if embedding is None and forced is None:
        return layer.shared(x)
    weights = {forced: 1.0}
    if forced is None:
        codes, scale = layer.router.codes, min(layer.router.logit_scale.exp().item(), 100.0)
        scores = [(scale * embedding @ code / embedding.norm() / code.norm()).exp().item() for code in codes]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: layer.router.top_k]
        weights = {index: scores[index] / sum(scores[other] for other in best) for index in best}
    first, second = layer.experts.fc1, layer.experts.fc2
    routed = torch.zeros_like(x)
    for index, weight in weights.items():
        hidden = F.gelu(F.linear(x, first.weight[index], first.bias[index]))
        routed = routed + weight * F.linear(hidden, second.weight[index], second.bias[index])
    gate = 1 / (1 + math.exp(-layer.gamma.item()))
    return gate * layer.shared(x) + (1 - gate) * routed


def reference_logits(model: Any, images: Tensor, embeddings: list[Tensor | None], forced: int | None) -> Tensor:
    """The network written out, image by image."""
    rows = []
    for image, embedding in zip(images, embeddings, strict=True):
        x = torch.cat([model.cls_token, model.patch_embed(image[None])], dim=1) + model.pos_embed
        for block in model.blocks:
            x = x + block.attn(block.norm1(x))
            normalized = block.norm2(x)
            is_mixture = hasattr(block.mlp, "router")
            x = x + (one_image(block.mlp, normalized, embedding, forced) if is_mixture else block.mlp(normalized))
        rows.append(model.head(model.norm(x)[:, 0]))
    return torch.cat(rows)


@torch.no_grad()
def test_predictions_with_metadata_without_and_in_each_expert_mode(moge):
    model = randomize(moge.small(dtype=torch.float64)).eval()
    for layer in mixture_layers(model).values():
        torch.nn.init.normal_(layer.router.codes)
    images, metadata = moge.inputs(6)
    images, nobody = images.double(), [None] * 6
    absent = metadata.isnan().any(1) if metadata.is_floating_point() else metadata < 0
    assert absent.tolist() == [False, True, False] * 2
    known = model.metadata_encoder.encoder(metadata.masked_fill(absent.view([-1] + [1] * (metadata.ndim - 1)), 0))
    embeddings = [None if unknown else row.double() for unknown, row in zip(absent, known, strict=True)]
    exact = {"rtol": 0, "atol": 1e-10}
    routed = reference_logits(model, images, embeddings, None)
    torch.testing.assert_close(model(images, metadata), routed, **exact)
    torch.testing.assert_close(model(images), reference_logits(model, images, nobody, None), **exact)
    for index in (0, 5):
        model.set_expert_mode(index)
        torch.testing.assert_close(model(images, metadata), reference_logits(model, images, nobody, index), **exact)
        assert torch.equal(model(images), model(images, metadata))
    model.set_expert_mode("shared")
    torch.testing.assert_close(model(images, metadata), reference_logits(model, images, nobody, None), **exact)
    model.set_expert_mode("routed")
    torch.testing.assert_close(model(images, metadata), routed, **exact)


def test_training_without_metadata_has_no_auxiliary_loss(moge):
    model = moge.small().train()
    model(moge.images())
    assert timm_moe_dg.auxiliary_loss(model).item() == 0


def test_a_given_encoder_takes_other_metadata():
    encoder = torch.nn.Linear(3, 16)
    model = randomize(COORDINATES.small(metadata_encoder=encoder, metadata_features=16)).eval()
    images, sensors = COORDINATES.images(), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [math.nan, 0.0, 0.0]])
    logits = model(images, sensors)
    assert torch.equal(logits[2], model(images)[2])
    assert not torch.equal(logits[1], model(images)[1])


def test_a_model_without_shared_experts_is_saved_trained_and_upcycled_as_such(tmp_path):
    model = timm.create_model("moge_tiny", shared_expert=False, router_noise=0.0, metadata_drop=0.0, **SIZES)
    assert saved(model, tmp_path)["shared_expert"] is False
    again, places = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval(), PLACES[:3]
    torch.testing.assert_close(again(images(), places), model.eval()(images(), places))
    with pytest.raises(MetadataError, match=r"^metadata of samples=\[2\]"):
        model(images(), places.index_fill(0, torch.tensor([2]), math.nan))
    model.train()(images(), places).sum().backward()
    assert "supcon_loss" not in reported_losses(model, torch.arange(3))  # a loss of the shared expert
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES).state_dict()
    timm.create_model("moge_tiny", shared_expert=False, **SIZES, **overlay(dense, 5))  # would name missing weights
    whole = timm.create_model("moge_tiny", **SIZES).state_dict()
    with pytest.raises(CheckpointError, match="not in the model"):
        timm.create_model("moge_tiny", shared_expert=False, **SIZES, **overlay(whole, 5))


# Beyond the training coordinates

NEAR = torch.tensor([[10.0, 50.0], [12.0, 51.0], [-120.0, 30.0]])
FAR = torch.tensor([[134.0, -26.0], [-60.0, -80.0], [179.0, 0.0]])
MIXED = torch.cat([NEAR[:2], FAR[:1]])
RADIUS = 300.0


def built() -> nn.Module:
    """A model whose experts differ enough to matter."""
    torch.manual_seed(0)
    model = timm.create_model("moge_tiny", **SIZES).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.mul_(20)
    return model


def indexed(radius: float | None = RADIUS) -> nn.Module:
    """A model that was trained near `NEAR`."""
    model = built()
    model.set_coverage(NEAR)
    model.set_coverage_radius(radius)
    return model


def test_a_radius_below_the_cells_of_the_index_is_noticed(caplog) -> None:
    """Training images may lie as far from the centers of their cells as `CELL_RADIUS`."""
    grid = torch.cartesian_prod(torch.linspace(10, 10.5, 40), torch.linspace(0, 0.5, 40))
    model = built()
    assert model.set_coverage(grid).distance(grid).max() == pytest.approx(CELL_RADIUS, rel=0.05)
    model.set_coverage_radius(CELL_RADIUS + 0.1)
    assert "cells of training coordinates" not in caplog.text
    model.set_coverage_radius(5.0)
    assert "cells of training coordinates reach 20 km" in caplog.text


def images(number: int = 3) -> Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def saved(model: nn.Module, folder) -> dict[str, object]:
    save_network(model, folder, [str(index) for index in range(5)], data_config(model))
    return json.loads((folder / "config.json").read_text())["model_args"]


@torch.no_grad()
def test_within_the_radius_nothing_changes_and_far_outside_the_shared_path_answers():
    plain, model = built(), indexed()
    assert torch.equal(model(images(), NEAR), plain(images(), NEAR))
    assert torch.equal(model(images(), FAR), plain(images()))
    assert (plain(images(), FAR) - plain(images())).abs().amax(1).min() > 1e-3
    places = torch.cat([NEAR[:1], FAR[:1], torch.full((1, 2), math.nan)])
    mixed = model(images(), places)
    torch.testing.assert_close(mixed[:1], plain(images(), NEAR[:1].expand(3, 2))[:1])
    torch.testing.assert_close(mixed[1:], plain(images())[1:])


@torch.no_grad()
@pytest.mark.parametrize("radius", [None, math.inf])
def test_without_a_radius_an_index_changes_nothing(radius):
    assert torch.equal(indexed(radius)(images(), MIXED), built()(images(), MIXED))


def test_training_is_routed_everywhere():
    model = indexed(0.0).train()
    model(images(), FAR)
    routings = [block.mlp.routing for block in model.blocks if block.routed]
    assert routings
    assert all(routing.routed.all() for routing in routings)


@torch.no_grad()
def test_half_precision_falls_back_at_the_same_places():
    model = indexed().bfloat16()
    mixed = model(images().bfloat16(), MIXED)
    assert torch.equal(mixed[2:], model(images().bfloat16())[2:])
    assert not torch.equal(mixed[:2], model(images().bfloat16())[:2])


@torch.no_grad()
def test_a_saved_folder_keeps_index_and_radius_and_another_radius_overrides(tmp_path):
    model, places = indexed(), MIXED
    args = saved(model, tmp_path)
    assert (args["coverage_points"], args["coverage_radius"]) == (3, RADIUS)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again.metadata_encoder.coverage.points, model.metadata_encoder.coverage.points)
    assert torch.equal(again(images(), places), model(images(), places))
    routed = built()(images(), places)
    for other in (
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, coverage_radius=1e5).eval(),
        load_trained(f"local-dir:{tmp_path}", coverage_radius=math.inf),
    ):
        assert torch.equal(other(images(), places), routed)
    assert saved(load_trained(f"local-dir:{tmp_path}", coverage_radius=math.inf), tmp_path)["coverage_radius"] is None


def test_a_folder_without_an_index_takes_no_radius(tmp_path):
    saved(built(), tmp_path)
    with pytest.raises(MetadataError, match=r"^coverage_radius=300\.0"):
        load_trained(f"local-dir:{tmp_path}", coverage_radius=RADIUS)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(1\): metadata_encoder.coverage.points"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, coverage_points=3)


@torch.no_grad()
def test_an_index_does_not_hinder_starting_a_model_without_one(tmp_path):
    model = indexed()
    saved(model, tmp_path)
    weights = {"file": str(tmp_path / "model.safetensors"), "source": "", "num_classes": 5}
    start = timm.create_model("moge_tiny", pretrained=True, pretrained_cfg_overlay=weights, **SIZES).eval()
    assert start.metadata_encoder.coverage is None
    assert torch.equal(start(images(), FAR), built()(images(), FAR))


# Features, in timm's forms


@pytest.fixture(scope="module")
def shared_and_dense():
    """MoGE in shared mode and the dense model whose feed-forwards are its shared experts."""
    dense = randomize(COORDINATES.small_dense(reg_tokens=2)).eval()
    model = randomize(upcycled(COORDINATES, dense, reg_tokens=2)).eval()
    weights = {key.replace(".mlp.shared.", ".mlp."): value for key, value in model.state_dict().items()}
    dense.load_state_dict({key: weights[key] for key in dense.state_dict()})
    assert type(dense) is VisionTransformer
    return model, dense


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments", [{}, {"indices": 2, "return_prefix_tokens": True, "norm": True}, {"output_dict": True}], ids=str
)
def test_moge_forward_intermediates_is_timms(shared_and_dense, arguments):
    ours, theirs = (one.forward_intermediates(torch.ones(2, 3, 32, 32), **arguments) for one in shared_and_dense)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_intermediates_need_no_hooks_afterwards_and_take_no_mask(shared_and_dense):
    model, _ = shared_and_dense
    with pytest.raises(TypeError, match="attn_mask"):
        model.forward_intermediates(torch.ones(2, 3, 32, 32), attn_mask=torch.ones(7, 7))
    assert not any(block._forward_pre_hooks for block in model.blocks)
