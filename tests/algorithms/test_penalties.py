"""What the methods penalize, against loops, closed forms and arithmetic by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.references.domain_algorithms import coral_distance as looped_coral
from tests.references.domain_algorithms import mmd_distance as looped_mmd
from tests.references.domain_algorithms import sample_gradients
from timm_moe_dg.algorithms.penalties import (
    class_balanced_cross_entropy,
    classifier_gradient_variance,
    coral_distance,
    feature_divergence,
    fishr_penalty,
    group_weights,
    input_gradient_penalty,
    irm_penalty,
    mmd_distance,
    rdm_penalties,
    spectral_decoupling,
    vrex_penalty,
)
from timm_moe_dg.errors import ArgumentError


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes(size, number, seed=0):
    return torch.randint(number, (size,), generator=torch.Generator().manual_seed(seed))


def test_irm_penalty_is_the_product_of_the_halves_slopes():
    logits, targets = normal(7, 3), classes(7, 3)

    def risk(rows, scale):
        return F.cross_entropy(scale * logits[rows], targets[rows]).item()

    step = 1e-5  # central differences
    even, odd = (
        (risk(slice(start, None, 2), 1 + step) - risk(slice(start, None, 2), 1 - step)) / (2 * step) for start in (0, 1)
    )
    assert irm_penalty(logits, targets).item() == pytest.approx(even * odd, abs=1e-9)


def test_irm_penalty_can_be_negative_and_has_a_second_derivative():
    # Right about the even image, wrong about the odd one: the scale should grow for one and shrink for the other
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    penalty = irm_penalty(logits, torch.tensor([0, 1]))
    p = 1 / (1 + math.exp(-1.0))
    assert penalty.item() == pytest.approx((p - 1) * p)
    assert torch.autograd.gradcheck(lambda x: irm_penalty(x, torch.tensor([0, 1])), logits)


def test_vrex_penalty_is_the_variance_of_risks():
    assert vrex_penalty(torch.tensor([1.0, 2.0, 6.0])).item() == pytest.approx((4 + 1 + 9) / 3)


def test_coral_distance_compares_means_and_covariances():
    x, y = normal(9, 4), 2 * normal(5, 4, seed=1) + 1
    expected = np.mean((x.mean(0) - y.mean(0)).numpy() ** 2)
    expected += np.mean((np.cov(x.numpy(), rowvar=False) - np.cov(y.numpy(), rowvar=False)) ** 2)
    assert coral_distance(x, y).item() == pytest.approx(expected)
    assert coral_distance(x, y).item() == pytest.approx(looped_coral(x, y).item())
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


def test_group_weights_follow_the_risks_step_by_step():
    # From ones, eta = log 2: risks (1, 0) double the first weight, (0, 2) quadruple the second, (1, 1) change nothing
    weights = torch.ones(2)
    seen = []
    for risks in ([1.0, 0.0], [0.0, 2.0], [1.0, 1.0]):
        weights = group_weights(weights, torch.tensor(risks, requires_grad=True), math.log(2))
        seen.append(weights.tolist())
    assert seen == [pytest.approx([2 / 3, 1 / 3]), pytest.approx([1 / 3, 2 / 3]), pytest.approx([1 / 3, 2 / 3])]
    assert not weights.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_gradient_variance_is_that_of_single_samples(bias):
    torch.manual_seed(0)
    classifier = nn.Linear(5, 3, bias=bias).double()
    features, targets = normal(8, 5), classes(8, 3)
    gradients = sample_gradients(classifier, features, targets)
    variance = classifier_gradient_variance(features, classifier(features), targets, bias=bias)
    torch.testing.assert_close(variance, gradients.var(0, correction=0), rtol=0, atol=1e-12)


def test_gradient_of_the_gradient_variance_flows_through_features_and_logits():
    torch.manual_seed(0)
    classifier, features = nn.Linear(5, 3).double(), normal(8, 5).requires_grad_()
    targets, weights = classes(8, 3), normal(18, seed=2)
    inputs = [features, *classifier.parameters()]
    slow = sample_gradients(classifier, features, targets).var(0, correction=0)
    fast = classifier_gradient_variance(features, classifier(features), targets)
    expected, actual = (torch.autograd.grad(weights @ variance, inputs) for variance in (slow, fast))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_fishr_penalty_by_hand():
    # Centers 2 and 4, all four distances 1 and 2: (1 + 4 + 1 + 4) / 4
    assert fishr_penalty(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).item() == pytest.approx(2.5)


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


def test_class_balance_gives_every_class_the_same_weight():
    logits, domains = normal(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    labels = torch.tensor([0, 0, 0, 0, 2, 2])  # of five classes, two are here
    losses = F.cross_entropy(logits, domains, reduction="none")
    expected = (losses[:4].mean() + losses[4:].mean()) / 5
    loss = class_balanced_cross_entropy(logits, domains, labels, labels.bincount(minlength=5))
    assert loss.item() == pytest.approx(expected.item())


def test_input_gradient_penalty_in_closed_form():
    inputs = normal(4, 3).requires_grad_()
    weights = normal(3, seed=1)
    # d/dx sum (w . x)^2 / 2 = (w . x) w
    penalty = input_gradient_penalty((inputs @ weights).square().sum() / 2, inputs)
    expected = ((inputs @ weights).square() * weights.square().sum()).mean()
    assert penalty.item() == pytest.approx(expected.item())
    penalty.backward()
    assert inputs.grad.abs().max() > 0


def test_spectral_decoupling_and_feature_divergence_by_hand():
    assert spectral_decoupling(torch.tensor([[1.0, 2.0], [3.0, 0.0]])).item() == pytest.approx(14 / 4)
    f, f0 = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]])
    # (1 / 4 + log 4 + 0 + log 1) / 2 entries / 2
    assert feature_divergence(f, f0, torch.tensor([4.0, 1.0])).item() == pytest.approx((0.25 + math.log(4)) / 4)


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
