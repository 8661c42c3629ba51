"""Averages of weights, on a network of one weight that is 1 after the first step, 2 after the second and so on."""

from statistics import fmean

import pytest
import timm
import torch
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.algorithms import AVERAGING, get_averaging
from timm_moe_dg.errors import ArgumentError


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def run(name, losses, every=2, rest=0, **hparams):
    """Evaluates after step 0 and then after every so many, as often as there are losses."""
    net = Counter()
    average = AVERAGING[name](net, hparams)
    evaluations = dict(zip(range(0, every * len(losses), every), losses, strict=True))
    for step in range(every * (len(losses) - 1) + 1 + rest):
        with torch.no_grad():
            net.value += 1
            net.seen += 1
        average.update(net, step)
        if step in evaluations:
            average.evaluated(step, evaluations[step])
    return average


def value(network):
    assert not network.training
    assert not network.value.requires_grad
    return network.value.item()


def weights(first, last):
    """After steps first..last, counted from 0."""
    return [step + 1 for step in range(first, last + 1)]


def test_exponential_average_from_the_starting_weights():
    average = run("ema", [1.0, 1.0], every=1, ema_decay=0.75)
    assert value(average.during()) == pytest.approx((0 * 0.75 + 1 * 0.25) * 0.75 + 2 * 0.25)
    assert average.final() is None


@pytest.mark.parametrize(("start", "expected"), [(1, fmean([1, 2, 3, 4, 5])), (3, fmean([3, 4, 5])), (9, 5)])
def test_moving_average_from_a_step_on(start, expected):
    average = run("moving", [1.0] * 5, every=1, sma_start_iter=start)
    assert value(average.during()) == pytest.approx(expected)
    assert average.during().seen == 5
    assert average.final() is None


def test_unknown_average_lists_the_choices():
    with pytest.raises(ArgumentError, match="averaging='sma': choose from ema, moving, swad, swad_released"):
        get_averaging("sma")


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("model", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_mixture_is_averaged_after_training_forwards_routers_included(name, model):
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": (1,)}
    network = timm.create_model(model, num_classes=2, num_experts=3, **size).train()
    average = AVERAGING[name](network, {"sma_start_iter": 1, "swad_n_converge": 2})
    network(torch.randn(2, 3, 16, 16)).sum().backward()  # layers now hold a graph
    seen = []
    for step in range(3):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        seen.append({key: parameter.detach().clone() for key, parameter in network.named_parameters()})
        average.update(network, step)
        average.evaluated(step, 1.0)
    found = average.during() or average.final()
    if name in ("moving", "swad"):
        for key, value in found.named_parameters():
            torch.testing.assert_close(value, sum(weights[key] for weights in seen) / 3)
    assert found(torch.randn(2, 3, 16, 16)).shape == (2, 2)
