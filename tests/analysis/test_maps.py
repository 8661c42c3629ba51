"""Expert maps are the routers' decisions without prefix tokens, attention maps are timm's, and pictures show both."""

import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.utils import AttentionExtract

from tests.models.cases import BY_NAME, FAMILIES, mixture_layers, randomize
from timm_moe_dg.analysis.maps import (
    chosen_block,
    class_attention,
    head_similarity,
    mixture_blocks,
    plot_attention_maps,
    plot_entropy_maps,
    plot_expert_maps,
    routing_maps,
)
from timm_moe_dg.analysis.run_view import ChosenImage
from timm_moe_dg.analysis.style import expert_color
from timm_moe_dg.errors import ArgumentError

LONG = "a name that goes on and on, as those of folders and of classes of birds sometimes do in fact"


@pytest.mark.parametrize("case", [case for case in FAMILIES if not case.metadata], ids=lambda case: case.name)
def test_maps_are_the_routers_first_choices(case):
    model = randomize(case.small(), std=0.3).train()
    (images,) = case.inputs(3)
    maps = routing_maps(model, [(images,)])
    assert model.training
    model.eval()
    expected = {}
    for block, layer in mixture_blocks(model).items():
        layer.register_forward_hook(
            lambda layer, inputs, _, block=block: expected.update({block: layer.router(inputs[0].flatten(0, 1))})
        )
    with torch.no_grad():
        model(images)
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    assert sorted(maps) == sorted(expected)
    for block, routing in expected.items():
        first = routing.logits.argmax(-1).view(3, -1)[:, model.num_prefix_tokens :]
        assert maps[block].first.tolist() == first.view(3, *grid).tolist()
        probabilities = routing.logits.softmax(-1)
        entropy = -(probabilities * probabilities.log()).sum(-1).view(3, -1)[:, model.num_prefix_tokens :]
        torch.testing.assert_close(maps[block].entropy, entropy.view(3, *grid), atol=1e-5, rtol=1e-5)
    assert not any(layer.record_routing for layer in mixture_layers(model).values())


def test_moge_gives_an_image_one_expert_and_none_without_a_place():
    case = BY_NAME["moge_tiny"]
    model = randomize(case.small(), std=0.3)
    images, metadata = case.inputs(3)
    maps = routing_maps(model, [(images, metadata)])
    for block in maps.values():
        assert block.first.shape == (3, 1, 1)
        assert (block.first.flatten() >= 0).tolist() == [True, False, True]
    assert all((block.first == -1).all() for block in routing_maps(model, [(images,)]).values())
    model.set_expert_mode(2)
    assert all((block.first == 2).all() for block in routing_maps(model, [(images, metadata)]).values())


def test_batches_are_put_together_and_recording_ends_where_the_model_fails():
    case = BY_NAME["gmoe_tiny_patch16"]
    model, images = randomize(case.small(), std=0.3), case.images(5)
    together, parts = routing_maps(model, [(images,)]), routing_maps(model, [(images[:2],), (images[2:],)])
    for block, routing in together.items():
        assert torch.equal(routing.first, parts[block].first)
    with pytest.raises(AssertionError):
        routing_maps(model, [(torch.zeros(1, 3, 17, 32),)])
    assert not any(layer.record_routing for layer in mixture_layers(model).values())


def test_a_dense_model_and_a_dense_block_are_named():
    case = BY_NAME["gmoe_tiny_patch16"]
    with pytest.raises(ArgumentError, match=r"VisionTransformer.*dense model"):
        mixture_blocks(case.small_dense())
    model = case.small()
    assert chosen_block(model, None) == max(mixture_blocks(model))
    with pytest.raises(ArgumentError, match="block=1: holds no experts; choose from 0, 2"):
        chosen_block(model, 1)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "gmoe_tiny_patch16"])
def test_maps_are_as_timm_extracts_them(name):
    sizes = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_heads": 4, "num_classes": 5}
    model = randomize(timm.create_model(name, **sizes), std=0.2).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    maps = class_attention(model, images)
    assert maps.shape == (2, 4, 4, 4)
    for block in model.blocks:
        block.attn.fused_attn = False
    last = list(AttentionExtract(model, method="fx")(images).values())[-1]
    expected = last[:, :, 0, model.num_prefix_tokens :].unflatten(-1, model.patch_embed.grid_size)
    torch.testing.assert_close(maps, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_every_family_has_maps_and_is_left_as_it_was(case):
    model = case.small().train()
    inputs = case.inputs(2)
    fused = [block.attn.fused_attn for block in model.blocks]
    maps = class_attention(model, *inputs)
    assert maps.shape[:2] == (2, 2)
    assert ((maps > 0) & (maps < 1)).all()
    assert model.training
    assert [block.attn.fused_attn for block in model.blocks] == fused
    assert not model.blocks[-1].attn.attn_drop._forward_pre_hooks


def test_heads_alike_have_similarity_one_and_disjoint_ones_zero():
    head = torch.rand(1, 1, 3, 3)
    alike = torch.cat([head, 0.5 * head, 2 * head], dim=1)
    disjoint = torch.eye(9).view(1, 9, 3, 3)
    assert head_similarity(alike).item() == pytest.approx(1.0)
    assert head_similarity(disjoint).item() == pytest.approx(0.0)
    assert head_similarity(head).isnan()
    by_hand = torch.tensor([[[[3.0, 4.0]], [[4.0, 3.0]]]])
    assert head_similarity(by_hand).item() == pytest.approx(24 / 25)


def rows_of(*names, side=24):
    """Gray photographs by row; None stands for a missing one."""
    pixels = Image.new("RGB", (2 * side, side), "gray")
    return [("a", [name and ChosenImage(name, pixels, None) for name in names])]


def test_cells_have_the_experts_color_and_number(figures, tmp_path):
    first = torch.tensor([[[0, 3], [5, 1]], [[0, -1], [3, 3]]])
    plot_expert_maps(rows_of("x.png", None, LONG), first, tmp_path / "experts.png")
    plot_expert_maps(rows_of("x.png"), torch.zeros(1, 24, 24, dtype=torch.long), tmp_path / "small.png")
    figure, small = figures
    overlay = figure.axes[0].images[1].get_array()
    for (row, column), index in np.ndenumerate(first[0].numpy()):
        hexed = "#" + "".join(f"{round(255 * value):02X}" for value in overlay[row, column, :3])
        assert hexed == expert_color(int(index))
    assert figure.axes[2].images[1].get_array()[0, 1, 3] == 0.0
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "3", "5", "1"]
    places = [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)]
    assert [text.get_position() for text in figure.axes[0].texts] == places
    names = ["shared only", *(f"expert {index}" for index in (0, 1, 3, 5))]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert figure.axes[1].texts[0].get_text() == "not in\nthis domain"
    assert not small.axes[0].texts


def test_entropy_is_a_share_and_heads_stand_side_by_side(figures, tmp_path):
    plot_entropy_maps(rows_of("x.png"), torch.full((1, 2, 2), math.log(6)), 6, tmp_path / "entropy.png")
    (_, (image,)) = rows_of("x.png")[0]
    maps = {"dense": torch.rand(1, 3, 4, 4), LONG: torch.rand(1, 1, 4, 4)}
    plot_attention_maps([image], maps, tmp_path / "attention.png")
    entropy, attention = figures
    assert np.allclose(entropy.axes[0].images[1].get_array(), 1.0)
    shown = [axes.images[0].get_array().shape for axes in attention.axes if axes.images]
    assert shown == [(4, 4)] * 3 + [(24, 48, 3), (4, 4), (24, 48, 3)]
    assert np.array_equal(attention.axes[2].images[0].get_array(), maps["dense"][0, 2])
