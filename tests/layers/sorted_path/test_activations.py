"""Activations written into given tensors: values and derivatives against autograd's, in every form."""

import pytest
import torch
from torch import nn

from tests.layers.sorted_path.forms import FORMS
from timm_moe_dg.layers.feed_forwards import GatedActivation
from timm_moe_dg.layers.sorted_path.activations import LOST, SortedActivation, sorted_activation

ROWS, HIDDEN = 5, 3


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def features(form):
    torch.manual_seed(0)
    return torch.randn(ROWS, HIDDEN * (1 + isinstance(form, GatedActivation)), dtype=torch.float64, requires_grad=True)


def test_values_are_the_modules_in_place_too(form):
    before, activation = features(form).detach(), sorted_activation(form)
    expected, out = form(before), torch.full((ROWS, HIDDEN), torch.nan, dtype=torch.float64)
    torch.testing.assert_close(activation(before), expected)
    activation.into(before, out)
    torch.testing.assert_close(out, expected)
    place = activation.halves(before)[0]
    activation.into(before, place)
    torch.testing.assert_close(place, expected)


@pytest.mark.parametrize("wants_hidden", [True, False])
def test_gradients_are_autograds(form, wants_hidden):
    before, activation = features(form), sorted_activation(form)
    after = form(before)
    grad = torch.linspace(-1, 2, after.numel(), dtype=torch.float64).view_as(after)
    (expected,) = torch.autograd.grad(after, before, grad)
    hidden = torch.full_like(after, torch.nan)
    found = grad.clone() if activation.gate is None else torch.full_like(before, torch.nan)
    activation.backward_into(before.detach(), found if activation.gate is None else grad, hidden, found, wants_hidden)
    torch.testing.assert_close(found, expected)
    if wants_hidden:
        torch.testing.assert_close(hidden, after.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_lost_is_zero_with_its_derivatives(form, dtype):
    activation, before = sorted_activation(form), features(form).detach().to(dtype)
    mask = torch.arange(ROWS * HIDDEN).view(ROWS, HIDDEN) % 3 == 0
    expected = form(before).masked_fill(mask, 0)
    activation.halves(before)[0].masked_fill_(mask, LOST)
    assert torch.equal(activation.lost(before), mask)
    hidden = torch.empty_like(expected)
    activation.into(before, hidden)
    assert torch.equal(hidden, expected)
    grad, found = torch.ones_like(expected), torch.empty_like(before)
    activation.backward_into(before, grad, hidden, found, wants_hidden=True)
    for half in found.split(HIDDEN, dim=-1):
        assert half[mask].eq(0).all()
        assert half[~mask].ne(0).all()


def test_which_modules_are_known():
    assert sorted_activation(nn.GELU(approximate="tanh")) == SortedActivation("gelu", "tanh")
    assert sorted_activation(GatedActivation(nn.SiLU(), gate_last=True)) == SortedActivation("silu", gate=1)

    class Scaled(nn.GELU):
        def forward(self, x):
            return super().forward(x) * 2

    for unknown in (nn.ReLU(), Scaled(), GatedActivation(nn.ReLU()), GatedActivation(GatedActivation(nn.GELU()))):
        assert sorted_activation(unknown) is None
