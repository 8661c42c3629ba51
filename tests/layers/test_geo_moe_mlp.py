"""The MoGE layer: images without metadata, expert modes, gradients; tests/properties has its equation."""

import pytest
import torch

from tests.references.weighted_experts import weighted_experts
from timm_moe_dg.errors import MetadataError, RouterError
from timm_moe_dg.layers import GeoMoeMlp


def make_layer(**kwargs) -> GeoMoeMlp:
    torch.manual_seed(0)
    layer = GeoMoeMlp(8, 16, context_features=12, num_experts=5, **kwargs)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    present = torch.tensor([True, False, True, True, False, True])
    return torch.randn(6, 4, 8, generator=generator), torch.randn(6, 12, generator=generator), present


def test_without_a_shared_expert_images_without_metadata_are_named():
    layer = make_layer(shared_expert=False)
    x, context, present = batch()
    with pytest.raises(MetadataError, match=r"metadata of samples=\[1, 4\]: have none, and shared_expert=False"):
        layer(x, context, present)
    with pytest.raises(RouterError, match="expert mode='shared': shared_expert=False leaves none"):
        layer.set_expert_mode("shared")
    layer.set_expert_mode(2)  # every image has a forced expert
    alone = weighted_experts(layer.experts, "gelu", None, x, torch.full((6, 1), 2), torch.ones(6, 1))
    torch.testing.assert_close(layer(x, context, present).double(), alone, rtol=1e-5, atol=1e-5)


def test_without_a_shared_expert_every_parameter_gets_a_gradient():
    layer = make_layer(shared_expert=False).train()
    x, context, present = batch()
    layer(x, context, torch.ones_like(present)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.report.shared is None


@pytest.mark.parametrize("mode", ["all", 5, -1, True, None])
def test_unknown_expert_modes_are_named(mode):
    with pytest.raises(RouterError, match=r"expert mode=.*choose 'routed', 'shared' or an index 0\.\.4"):
        make_layer().set_expert_mode(mode)


def test_routing_record_says_which_images_were_routed():
    layer = make_layer().train()
    x, context, present = batch()
    layer(x, context, present)
    assert torch.equal(layer.routing.routed, present)
