"""The mixture layers against timm's Mlp, and what may be done to a module; tests/properties has their equations."""

import pytest
import torch
from timm.layers import Mlp

from tests.references.weighted_experts import weighted_experts
from timm_moe_dg.layers import GeoMoeMlp, MoeMlp
from timm_moe_dg.layers.reports import vmoe_loss


def make_layer(**kwargs) -> MoeMlp:
    torch.manual_seed(0)
    layer = MoeMlp(8, 16, **kwargs)
    for parameter in layer.parameters():
        if parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def images(batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(1))


def test_with_top_1_the_output_is_scaled_by_the_probability():
    dense = Mlp(8, 16)
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=1).eval()
    probability = layer.router(images().reshape(-1, 8)).probabilities.amax(1).view(3, 5, 1)
    torch.testing.assert_close(layer(images()), probability * dense(images()), rtol=1e-5, atol=1e-6)


def test_padding_is_not_routed_and_takes_no_capacity():
    layer = make_layer(num_experts=4, capacity_factor=0.5, router_noise=0.0)
    alone = layer(images(1, 6))
    expected = layer.routing
    valid = torch.tensor([[True, False, True, True, False, True, True, False, False, True]])
    padded = torch.full((1, 10, 8), 9.0).masked_scatter(valid.unsqueeze(2), images(1, 6))
    layer.valid = valid
    output = layer(padded)
    torch.testing.assert_close(output[valid], alone[0])
    assert output[~valid].eq(0).all()
    assert torch.equal(layer.routing.routed, valid[0])
    assert torch.equal(layer.routing.dropped[valid[0]], expected.dropped)
    assert not layer.routing.dropped[~valid[0]].any()
    torch.testing.assert_close(vmoe_loss(layer.routing), vmoe_loss(expected))
    assert layer(padded)[~valid].ne(0).any()  # a mask is for one forward
    assert layer.routing.routed is None


def test_double_precision_gradients_equal_finite_differences():
    layer = make_layer(router_noise=0.0).double().eval()
    x = images().double().reshape(-1, 8)[:4].requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


def test_dropout_frozen_parameters_and_the_mode_come_along():
    dense = Mlp(8, 16, drop=(0.2, 0.3))
    dense.fc1.weight.requires_grad_(False)
    layer = MoeMlp.from_dense(dense, expert_drop=0.5)
    assert (layer.experts.drop.p, layer.drop.p) == (pytest.approx(1 - 0.8 * 0.5), 0.3)
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"experts.fc1.weight"}
    assert layer.training
    assert not MoeMlp.from_dense(dense.eval()).training


def test_without_a_shared_expert_a_forced_one_answers_for_every_image():
    layer = GeoMoeMlp(8, 16, context_features=12, num_experts=5, shared_expert=False).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, context = torch.randn(6, 4, 8), torch.randn(6, 12)
    present = torch.tensor([True, False, True, True, False, True])
    layer.set_expert_mode(2)
    alone = weighted_experts(layer.experts, "gelu", None, x, torch.full((6, 1), 2), torch.ones(6, 1))
    torch.testing.assert_close(layer(x, context, present).double(), alone, rtol=1e-5, atol=1e-5)
    layer.set_expert_mode("routed")
    layer.train()(x, context, torch.ones_like(present)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert layer.report.shared is None
