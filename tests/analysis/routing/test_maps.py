"""Expert maps are the routers' decisions without the prefix tokens; models are left unchanged."""

import math

import pytest
import torch

from tests.models.cases import BY_NAME, FAMILIES, mixture_layers, randomize
from timm_moe_dg.analysis.routing.maps import chosen_block, mixture_blocks, routing_maps, routing_maps_of
from timm_moe_dg.errors import ArgumentError


@pytest.mark.parametrize("case", [case for case in FAMILIES if not case.metadata], ids=lambda case: case.name)
def test_maps_are_the_routers_first_choices(case):
    model = randomize(case.small(), std=0.3).train()
    (images,) = case.inputs(3)
    maps = routing_maps(model, images)
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


def test_entropy_is_at_most_that_of_all_experts_alike():
    case = BY_NAME["gmoe_tiny_patch16"]
    model = case.small()
    for layer in mixture_blocks(model).values():
        layer.router.codes.data.fill_(1.0)
    maps = routing_maps(model, case.images(2))
    for block in maps.values():
        torch.testing.assert_close(block.entropy, torch.full_like(block.entropy, math.log(block.num_experts)))


def test_moge_gives_an_image_one_expert_and_none_without_a_place():
    case = BY_NAME["moge_tiny"]
    model = randomize(case.small(), std=0.3)
    images, metadata = case.inputs(3)
    maps = routing_maps(model, images, metadata)
    for block in maps.values():
        assert block.first.shape == (3, 1, 1)
        assert (block.first.flatten() >= 0).tolist() == [True, False, True]
    assert all((block.first == -1).all() for block in routing_maps(model, images).values())
    model.set_expert_mode(2)
    assert all((block.first == 2).all() for block in routing_maps(model, images, metadata).values())


def test_batches_are_put_together_and_recording_ends_where_the_model_fails():
    case = BY_NAME["gmoe_tiny_patch16"]
    model, images = randomize(case.small(), std=0.3), case.images(5)
    together, parts = routing_maps(model, images), routing_maps_of(model, [(images[:2],), (images[2:],)])
    for block, routing in together.items():
        assert torch.equal(routing.first, parts[block].first)
    with pytest.raises(AssertionError):
        routing_maps(model, torch.zeros(1, 3, 17, 32))
    assert not any(layer.record_routing for layer in mixture_layers(model).values())


def test_a_dense_model_and_a_dense_block_are_named():
    case = BY_NAME["gmoe_tiny_patch16"]
    with pytest.raises(ArgumentError, match=r"VisionTransformer.*dense model"):
        mixture_blocks(case.small_dense())
    blocks = mixture_blocks(case.small())
    assert chosen_block(blocks, None) == max(blocks)
    with pytest.raises(ArgumentError, match="block=1: holds no experts; choose from 0, 2"):
        chosen_block(blocks, 1)
