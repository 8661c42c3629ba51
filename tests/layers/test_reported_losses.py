"""Losses that layers report: routers' against their definitions, MoGE's against their equations written as loops."""

import math

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from timm_moe_dg.layers import LinearRouter
from timm_moe_dg.layers.reports import (
    cka_diversity_loss,
    importance_loss,
    load_loss,
    supcon_invariance_loss,
    tutel_loss,
    vmoe_loss,
)


def squared_cv(values: list[float], correction: int = 0) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - correction) / mean**2


def routed(tokens: int = 30, **kwargs):
    torch.manual_seed(0)
    router = LinearRouter(12, 4, 2, **kwargs)
    nn.init.normal_(router.gate.weight, std=0.5)
    return router(torch.randn(tokens, 12))


def expected_load(clean: list[list[float]], noisy: list[list[float]], top_k: int, std: float) -> list[float]:
    load = [0.0] * len(clean[0])
    for clean_row, noisy_row in zip(clean, noisy, strict=True):
        threshold = sorted(noisy_row)[-top_k]
        for expert, logit in enumerate(clean_row):
            load[expert] += 1 - scipy.stats.norm.cdf((threshold - logit) / std)
    return load


def test_importance_of_a_worked_example():
    # sums 1.5, 0.5: mean 1, variance 0.25
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    assert importance_loss(probabilities).item() == pytest.approx(0.25)
    assert importance_loss(probabilities, unbiased=True).item() == pytest.approx(0.5)
    assert importance_loss(probabilities, torch.tensor([False, True])).item() == pytest.approx(0.04)


def test_losses_are_zero_when_balanced_and_largest_when_one_expert_has_all():
    assert importance_loss(torch.full((6, 4), 0.25)).item() == 0
    assert importance_loss(torch.eye(4)[[2, 2, 2]]).item() == pytest.approx(3)  # E - 1
    equal = torch.zeros(6, 4)
    assert load_loss(equal, equal, 2, 0.25).item() == pytest.approx(0, abs=1e-6)


def test_layer_loss_is_the_mean_of_both_or_importance_alone_without_noise():
    output = routed()
    importance = squared_cv(output.logits.softmax(-1).sum(0).tolist())
    load = squared_cv(expected_load(output.logits.tolist(), output.noisy_logits.tolist(), 2, 0.25))
    assert vmoe_loss(output).item() == pytest.approx((importance + load) / 2, rel=1e-4)
    quiet = routed(noise_std=0.0)
    assert vmoe_loss(quiet).item() == pytest.approx(squared_cv(quiet.probabilities.sum(0).tolist()), rel=1e-4)


def test_the_tutel_form_compares_noisy_logits_with_probabilities_and_is_unbiased():
    output = routed()
    probabilities = output.logits.softmax(-1)
    importance = squared_cv(probabilities.sum(0).tolist(), correction=1)
    load = expected_load(probabilities.tolist(), output.noisy_logits.tolist(), 2, 0.25)
    expected = (importance + squared_cv(load, correction=1)) / 2
    assert tutel_loss(output).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", [vmoe_loss, tutel_loss])
def test_degenerate_batches_give_a_finite_zero(loss):
    one_expert = LinearRouter(12, 1, 1, normalize_weights=False)(torch.randn(5, 12))
    assert loss(one_expert).item() == 0
    nobody = loss(routed()._replace(routed=torch.zeros(30, dtype=torch.bool)))
    assert nobody.item() == 0
    nobody.backward()


# MoGE's equations


def looped_cka(outputs: Tensor) -> float:
    """MoGE, equation 2, pair by pair with explicit feature covariances."""
    experts = len(outputs)
    total = 0.0
    for i in range(experts):
        for j in range(i + 1, experts):
            hi = outputs[i] - outputs[i].mean(0)
            hj = outputs[j] - outputs[j].mean(0)
            cross = (hi.T @ hj).square().sum()
            total += (cross / ((hi.T @ hi).square().sum().sqrt() * (hj.T @ hj).square().sum().sqrt())).item()
    return 2 * total / (experts * (experts - 1))


def looped_supcon(features: Tensor, targets: list[int], domains: list[int], temperature: float) -> float:
    """MoGE, equation 3, anchor by anchor; a domain of -1 takes no part."""
    q = [feature / feature.norm() for feature in features]
    terms = []
    for i in range(len(q)):
        positives, negatives = [], []
        for j in range(len(q)):
            if domains[i] < 0 or domains[j] < 0:
                continue
            similarity = math.exp(float(q[i] @ q[j]) / temperature)
            if targets[i] == targets[j] and domains[i] != domains[j]:
                positives.append(similarity)
            if targets[i] != targets[j] and domains[i] == domains[j]:
                negatives.append(similarity)
        if positives and negatives:
            terms.append(math.log(sum(positives)) - math.log(sum(positives) + sum(negatives)))
    return -sum(terms) / len(terms)


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 7, 7), (6, 40, 8)])
def test_cka_equals_the_loop_over_pairs(shape: tuple[int, int, int]) -> None:
    outputs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3.0
    assert cka_diversity_loss(outputs).item() == pytest.approx(looped_cka(outputs), abs=1e-12)


def test_equal_experts_are_at_the_maximum_where_the_gradient_is_zero() -> None:
    tokens = torch.randn(32, 8, dtype=torch.float64)
    outputs = tokens.expand(3, -1, -1).clone().requires_grad_()
    loss = cka_diversity_loss(outputs)
    loss.backward()
    assert loss.item() == pytest.approx(1.0, abs=1e-12)
    assert outputs.grad.abs().max() < 1e-12

    moved = (outputs.detach() + 0.1 * torch.randn_like(outputs)).requires_grad_()
    loss = cka_diversity_loss(moved)
    loss.backward()
    assert loss.item() < 1.0 - 1e-4
    assert moved.grad.abs().max() > 1e-5  # the perturbation has lifted the zero gradient


def test_a_single_expert_and_constant_outputs_stay_finite_with_a_graph() -> None:
    for outputs in (torch.randn(1, 4, 3), torch.ones(2, 4, 3)):
        outputs.requires_grad_()
        loss = cka_diversity_loss(outputs)
        loss.backward()
        assert loss.item() == 0.0
        assert outputs.grad.isfinite().all()


def test_cka_is_computed_in_float32_under_autocast_and_from_bfloat16() -> None:
    outputs = torch.randn(3, 64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert cka_diversity_loss(outputs).item() == pytest.approx(looped_cka(outputs.double()), abs=1e-5)
    assert cka_diversity_loss(outputs.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_supcon_equals_the_loop_over_anchors(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 4, (24,), generator=generator)
    domains = torch.randint(-1, 3, (24,), generator=generator)
    expected = looped_supcon(features, targets.tolist(), domains.tolist(), temperature)
    assert supcon_invariance_loss(features, targets, domains, temperature).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("targets", "domains"),
    [
        ([0, 1, 2, 3], [0, 0, 0, 0]),  # negatives only
        ([0, 0, 0, 0], [0, 1, 2, 3]),  # positives only
        ([0, 0, 1, 1], [-1, -1, -1, -1]),  # no sample has a domain
    ],
)
def test_without_an_anchor_that_has_both_sets_the_loss_is_zero_with_a_graph(
    targets: list[int], domains: list[int]
) -> None:
    features = torch.randn(4, 3, requires_grad=True)
    loss = supcon_invariance_loss(features, torch.tensor(targets), torch.tensor(domains))
    loss.backward()
    assert loss.item() == 0.0
    assert features.grad.abs().max() == 0.0


def test_supcon_in_closed_form() -> None:
    # Anchor 0: class 0, domain 0. Its positive (1) lies at cosine 0, its negative (2) at cosine 1; no other has both.
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    loss = supcon_invariance_loss(features, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), temperature=0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-6)
