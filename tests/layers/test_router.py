"""Routers against hand arithmetic: logits, selection, weights, noise and the precision they are computed in."""

import math

import pytest
import torch

from tests.references.naive_moe import naive_top_k
from timm_moe_dg.layers import CosineRouter, LinearRouter, MetadataRouter
from timm_moe_dg.layers.router import top_k_indices


def tokens(number: int = 40, features: int = 12) -> torch.Tensor:
    return torch.randn(number, features, generator=torch.Generator().manual_seed(0))


def test_cosine_logits_are_scaled_cosines():
    router = CosineRouter(12, 4, 2).eval()
    x = tokens()
    logits = router(x).logits
    for row, token in zip(logits, x, strict=True):
        projected = router.proj.weight @ token + router.proj.bias
        cosines = [torch.dot(projected, code) / projected.norm() / code.norm() for code in router.codes]
        torch.testing.assert_close(row, 2.0 * torch.stack(cosines), rtol=1e-5, atol=1e-6)


def test_the_scale_of_cosine_logits_is_at_most_100():
    router = CosineRouter(12, 4, 2).eval()
    small = router(tokens()).logits
    torch.nn.init.constant_(router.logit_scale, math.log(1e4))
    torch.testing.assert_close(router(tokens()).logits, small * 50, rtol=1e-5, atol=1e-5)


def test_linear_logits_have_no_bias():
    router = LinearRouter(12, 4, 2).eval()
    assert [name for name, _ in router.named_parameters()] == ["gate.weight"]
    torch.testing.assert_close(router(tokens()).logits, tokens() @ router.gate.weight.T)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_selection_takes_the_largest_and_the_lowest_index_of_equals(top_k):
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(200, 6, generator=generator) * 3).round() / 3  # four values, so most rows have ties
    expected = [naive_top_k(row, top_k) for row in scores.tolist()]
    assert top_k_indices(scores, top_k).tolist() == expected


def test_noise_is_only_in_training_and_has_the_stated_deviation():
    router = LinearRouter(12, 4, 2)
    x = tokens(20_000)
    torch.manual_seed(0)
    output = router(x)
    noise = output.noisy_logits - output.logits
    assert output.noise_std == 0.25
    # four standard errors of a deviation over 80,000 draws: 0.25 * 4 / sqrt(2 * 80000)
    assert noise.std().item() == pytest.approx(0.25, abs=0.0025)
    assert noise.mean().abs() < 4 * 0.25 / math.sqrt(80_000)
    still = router.eval()(x)
    assert still.noisy_logits is still.logits
    assert still.noise_std == 0


def test_noise_moves_the_selection_but_not_the_balanced_probabilities():
    router = LinearRouter(12, 4, 2)
    torch.manual_seed(0)
    output = router(tokens())
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))
    assert output.expert_indices.tolist() == [naive_top_k(row, 2) for row in output.noisy_logits.tolist()]
    assert output.expert_indices.tolist() != [naive_top_k(row, 2) for row in output.logits.tolist()]


@pytest.mark.parametrize("router_class", [CosineRouter, LinearRouter])
def test_autocast_does_not_change_the_routing(router_class):
    router = router_class(12, 6, 2).eval()
    expected = router(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        actual = router(tokens())
    assert actual.logits.dtype == torch.float32
    assert torch.equal(actual.logits, expected.logits)


def test_half_precision_weights_are_used_in_float32():
    router = CosineRouter(12, 6, 2).eval().bfloat16()
    x = tokens().bfloat16()
    assert torch.equal(router(x).logits, router.float()(x.float()).logits)


def test_metadata_router_mixes_over_the_best_k_alone():
    router = MetadataRouter(12, 5, 3).eval()
    output = router(tokens())
    mass = torch.zeros(40, 5).scatter(1, output.expert_indices, output.combine_weights)
    torch.testing.assert_close(mass.sum(1), torch.ones(40))
    torch.testing.assert_close(output.probabilities, mass)
    chosen = output.logits.gather(1, output.expert_indices)
    torch.testing.assert_close(output.combine_weights, chosen.softmax(1))
