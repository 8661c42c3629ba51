"""The losses that divide the work between experts, against their equations written out as loops."""

import math

import pytest
import torch
from torch import Tensor

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.losses import cka_diversity_loss, supcon_invariance_loss


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


def test_cka_ignores_rotation_scale_and_offset_of_an_expert() -> None:
    tokens = torch.randn(16, 6, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    outputs = torch.stack([tokens, 5.0 * tokens @ rotation + 2.0])
    assert cka_diversity_loss(outputs).item() == pytest.approx(1.0, abs=1e-12)


def test_experts_without_a_common_direction_have_no_similarity() -> None:
    # columns over four tokens: (1, -1, 0, 0) and (0, 0, 1, -1) are centered and orthogonal
    first = torch.tensor([[1.0], [-1.0], [0.0], [0.0]])
    assert cka_diversity_loss(torch.stack([first, first.flip(0)])).item() == pytest.approx(0.0, abs=1e-7)


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


def test_supcon_in_closed_form() -> None:
    # Anchor 0: class 0, domain 0. Its positive (1) lies at cosine 0, its negative (2) at cosine 1; no other has both.
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    loss = supcon_invariance_loss(features, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), temperature=0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-6)


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


def test_descending_supcon_draws_classes_together_across_domains() -> None:
    torch.manual_seed(0)
    features = torch.randn(40, 8, requires_grad=True)
    targets, domains = torch.arange(40) % 2, torch.arange(40) // 20
    for _ in range(200):
        (gradient,) = torch.autograd.grad(supcon_invariance_loss(features, targets, domains, 0.5), features)
        features = (features - 2.0 * gradient).detach().requires_grad_()
    q = torch.nn.functional.normalize(features, dim=1)
    cosine = q @ q.T
    other_domain = domains[:, None] != domains
    same = targets[:, None] == targets
    assert cosine[same & other_domain].mean() > 0.5
    assert cosine[~same & ~other_domain].mean() < -0.5


def test_wrong_shapes_and_temperatures_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="outputs"):
        cka_diversity_loss(torch.ones(3, 4))
    with pytest.raises(ArgumentError, match="features, targets, domains"):
        supcon_invariance_loss(torch.ones(3, 4), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ArgumentError, match="temperature"):
        supcon_invariance_loss(torch.ones(3, 4), torch.zeros(3), torch.zeros(3), temperature=0.0)
