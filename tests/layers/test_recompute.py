"""The recomputed half of a feed-forward against autograd's own, and what it keeps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.layers.recompute import gelu_linear


def operands(dtype=torch.float64, items=7, hidden=6, width=4):
    generator = torch.Generator().manual_seed(0)
    shapes = [(items, hidden), (width, hidden), (width,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_equal_autograds_own(approximate, bias):
    before, weight, offset = operands()
    inputs = [before, weight, *([offset] if bias else [])]
    act = nn.GELU(approximate)
    actual = gelu_linear(before, act, weight, offset if bias else None)
    expected = F.linear(act(before), weight, offset if bias else None)
    torch.testing.assert_close(actual, expected)
    probe = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view_as(actual)
    for got, want in zip(*(torch.autograd.grad((y * probe).sum(), inputs) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivatives_are_right_too():
    assert torch.autograd.gradgradcheck(lambda *x: gelu_linear(x[0], nn.GELU(), *x[1:]), operands(items=3))


def test_gradients_with_dropout_equal_finite_differences():
    def with_the_same_mask(*inputs):
        torch.manual_seed(3)
        return gelu_linear(inputs[0], nn.GELU(), *inputs[1:], drop=0.4)

    assert torch.autograd.gradcheck(with_the_same_mask, operands())


def test_dropout_loses_its_share_and_keeps_the_mean():
    # one hidden feature an item and a weight of 1: the output is GELU(3) / 0.75 where it was kept, else 0
    outputs = gelu_linear(torch.full((40_000, 1), 3.0), nn.GELU(), torch.ones(1, 1), None, drop=0.25)
    value = F.gelu(torch.tensor(3.0)).item()
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], torch.full_like(outputs[kept], value / 0.75))
    # binomial deviation of the share: sqrt(0.25 * 0.75 / 40000) = 0.0022; five of them
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.011)


def test_losing_everything_leaves_the_bias():
    before, weight, bias = operands()
    torch.testing.assert_close(gelu_linear(before, nn.GELU(), weight, bias, drop=1.0), bias.expand(7, 4))


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_experts_keep_one_hidden_tensor_of_floats(drop):
    experts = StackedExperts(3, 8, 32, hidden_drop=drop).train()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        experts(torch.randn(10, 8), torch.arange(20).view(10, 2) % 3, torch.rand(10, 2))
    hidden = [tensor for tensor in kept if tensor.shape[-1] == 32 and tensor.shape not in experts.fc2.weight.shape]
    hidden = [tensor for tensor in hidden if len(tensor) != 8]  # an expert's second weight
    assert sum(tensor.numel() for tensor in hidden if tensor.is_floating_point()) == 20 * 32
    assert sum(tensor.numel() for tensor in hidden if tensor.dtype == torch.bool) == (20 * 32 if drop else 0)


def test_other_activations_and_normalised_hidden_features_take_the_plain_way():
    torch.manual_seed(0)
    for options in ({"act_layer": nn.ReLU}, {"norm_layer": nn.LayerNorm}):
        experts = StackedExperts(1, 8, 16, **options)
        x = torch.randn(5, 8)
        hidden = experts.norm(experts.act(F.linear(x, experts.fc1.weight[0], experts.fc1.bias[0])))
        expected = F.linear(hidden, experts.fc2.weight[0], experts.fc2.bias[0])
        torch.testing.assert_close(experts(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)), expected)
