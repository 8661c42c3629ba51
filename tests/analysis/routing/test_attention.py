"""Attention maps against timm's extraction, and their statistics in closed form."""

import pytest
import timm
import torch
from timm.utils import AttentionExtract

from tests.models.cases import BY_NAME, FAMILIES, randomize
from timm_moe_dg.analysis.routing.attention import class_attention, head_similarity, mass_mask
from timm_moe_dg.errors import ArgumentError


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


def test_attention_is_restored_where_the_model_fails_and_a_model_without_a_class_token_is_named():
    model = BY_NAME["gmoe_tiny_patch16"].small()
    with pytest.raises(AssertionError):
        class_attention(model, torch.zeros(1, 3, 17, 32))
    assert model.blocks[-1].attn.fused_attn
    assert not model.blocks[-1].attn.attn_drop._forward_pre_hooks
    model = BY_NAME["gmoe_tiny_patch16"].small(class_token=False, global_pool="avg")
    with pytest.raises(ArgumentError, match="no class token"):
        class_attention(model, torch.zeros(1, 3, 32, 32))


def test_heads_alike_have_similarity_one_and_disjoint_ones_zero():
    head = torch.rand(1, 1, 3, 3)
    alike = torch.cat([head, 0.5 * head, 2 * head], dim=1)
    disjoint = torch.eye(9).view(1, 9, 3, 3)
    assert head_similarity(alike).item() == pytest.approx(1.0)
    assert head_similarity(disjoint).item() == pytest.approx(0.0)
    assert head_similarity(head).isnan()
    by_hand = torch.tensor([[[[3.0, 4.0]], [[4.0, 3.0]]]])
    assert head_similarity(by_hand).item() == pytest.approx(24 / 25)


def test_the_mask_keeps_the_fewest_cells_that_hold_the_share():
    maps = torch.tensor([[[[0.4, 0.1], [0.3, 0.2]]]])
    for share, cells in ((0.4, [0]), (0.41, [0, 2]), (0.7, [0, 2]), (0.9, [0, 2, 3]), (1.0, [0, 1, 2, 3])):
        assert mass_mask(maps, share).flatten().nonzero().flatten().tolist() == cells
    with pytest.raises(ArgumentError, match="mass"):
        mass_mask(maps, 0.0)
