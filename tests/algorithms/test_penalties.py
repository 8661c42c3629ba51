"""Penalties of methods against loops and closed forms. The references in test_base.py have the others."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.references.domain_algorithms import mmd_distance as looped_mmd
from tests.references.domain_algorithms import sample_gradients
from timm_moe_dg.algorithms.penalties import (
    classifier_gradient_variance,
    coral_distance,
    irm_penalty,
    mmd_distance,
    rdm_penalties,
)
from timm_moe_dg.errors import ArgumentError


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(size, number, seed=0):
    return torch.randint(number, (size,), generator=torch.Generator().manual_seed(seed))


def test_irm_penalty_can_be_negative_and_has_a_second_derivative():
    # Right about the even image, wrong about the odd one: the scale should grow for one and shrink for the other
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    penalty = irm_penalty(logits, torch.tensor([0, 1]))
    p = 1 / (1 + math.exp(-1.0))
    assert penalty.item() == pytest.approx((p - 1) * p)
    assert torch.autograd.gradcheck(lambda x: irm_penalty(x, torch.tensor([0, 1])), logits)


def test_coral_distance_compares_means_and_covariances():
    x, y = normal(9, 4), 2 * normal(5, 4, seed=1) + 1
    expected = np.mean((x.mean(0) - y.mean(0)).numpy() ** 2)
    expected += np.mean((np.cov(x.numpy(), rowvar=False) - np.cov(y.numpy(), rowvar=False)) ** 2)
    assert coral_distance(x, y).item() == pytest.approx(expected)
    assert coral_distance(x, x.flip(0)).item() == pytest.approx(0.0, abs=1e-20)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_mmd_distance_is_a_sum_of_kernels_over_pairs(scale):
    x, y = scale * normal(6, 3), scale * normal(4, 3, seed=1) + scale
    assert mmd_distance(x, y).item() == pytest.approx(looped_mmd(x, y).item(), abs=1e-12)
    assert mmd_distance(x, x.flip(0)).item() == pytest.approx(0.0, abs=1e-12)


def test_mmd_gradient_is_finite_where_points_coincide():
    x = normal(4, 3).requires_grad_()
    mmd_distance(x, x.detach()).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_variance_is_that_of_single_samples(bias):
    classifier = nn.Linear(5, 3, bias=bias).double()
    features, targets = normal(8, 5), classes(8, 3)
    gradients = sample_gradients(classifier, features, targets)
    variance = classifier_gradient_variance(features, classifier(features), targets, bias=bias)
    torch.testing.assert_close(variance, gradients.var(0, correction=0), rtol=0, atol=1e-12)


def test_rdm_takes_the_domain_with_the_largest_mean_risk():
    risks = [normal(5).square(), normal(4, seed=1).square() + 3, normal(6, seed=2).square()]
    matching, variance = rdm_penalties(risks)
    everywhere = torch.cat(risks)
    gammas = [10.0**power for power in range(-4, 4)]
    assert matching.item() == pytest.approx(
        looped_mmd(risks[1][:, None], everywhere[:, None], gammas).item(), abs=1e-12
    )
    expected = np.var(everywhere.numpy(), ddof=1) + np.var(risks[1].numpy(), ddof=1)
    assert variance.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "compute"),
    [
        ("IRM", lambda: irm_penalty(torch.ones(1, 2), torch.tensor([0]))),
        ("CORAL", lambda: coral_distance(torch.ones(3, 2), torch.ones(1, 2))),
        ("RDM", lambda: rdm_penalties([torch.ones(3), torch.ones(1)])),
    ],
)
def test_a_single_image_is_refused_where_two_are_needed(method, compute):
    with pytest.raises(ArgumentError, match=f"batch_size=1: {method} needs 2 images"):
        compute()
