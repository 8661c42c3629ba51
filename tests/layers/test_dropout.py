"""Sampled dropout: the distribution of what is dropped, the scale of the rest, and compiled programs."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.checkpoint import checkpoint

from timm_moe_dg.layers.experts import dropout_factors, dropped_positions, sampled_dropout


@pytest.mark.parametrize("rate", [2**-10, 0.1, 0.5, 0.9])
def test_steps_between_dropped_positions_are_geometric(rate):
    positions = dropped_positions(int(100_000 / rate), rate)
    steps = torch.cat([positions[:1] + 1, positions.diff()]).numpy()
    # bins of about equal probability, the last one open
    ends = sorted({int(stats.geom.ppf(quantile, rate)) for quantile in np.linspace(0.02, 0.98, 25)})
    counts = np.bincount(np.searchsorted(ends, steps), minlength=len(ends) + 1)
    expected = len(steps) * np.diff([0, *stats.geom.cdf(ends, rate), 1])
    assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize("rate", [1e-30, 1e-12, 2**-16, 0.1, 0.25, 0.5, 1 - 2**-16])
def test_remaining_features_make_up_for_dropped_ones_at_any_rate(rate):
    count = 400_003
    x = torch.full((count,), 3.0, requires_grad=True)
    output = sampled_dropout(x, rate)
    remaining = output != 0
    torch.testing.assert_close(output[remaining], torch.full_like(output[remaining], 3 / (1 - rate)))
    # six binomial deviations, and one feature
    assert remaining.sum().item() == pytest.approx(count * (1 - rate), abs=6 * (count * rate * (1 - rate)) ** 0.5 + 1)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(grad * 3, output)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_and_everything_is_dropped(rate):
    x = torch.ones(3, 4)
    assert sampled_dropout(x, rate).eq(1 - rate).all()
    assert sampled_dropout(torch.ones(0, 4), 0.5).shape == (0, 4)


def test_dropout_follows_torchs_generator_and_no_default_of_type_or_device():
    x = torch.ones(40, 10, dtype=torch.bfloat16)
    torch.manual_seed(3)
    expected, other = sampled_dropout(x, 0.2), sampled_dropout(x, 0.2)
    assert not torch.equal(expected, other)
    assert expected.dtype == torch.bfloat16
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert torch.equal(sampled_dropout(x, 0.2), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_compiled_checkpointed_dropout_drops_the_same_features_again():
    torch._dynamo.reset()
    weight = torch.randn(64, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: checkpoint(lambda x: sampled_dropout(x, 0.5) @ weight, x, use_reentrant=False),
        fullgraph=True,
        backend="aot_eager",
    )
    output = compiled(torch.randn(16, 64)).sum()
    (grad,) = torch.autograd.grad(output, weight)
    # Linear in these weights: with the same features, the derivative along them is the value
    torch.testing.assert_close((grad * weight).sum(), output)


def test_two_compiled_calls_differ():
    torch._dynamo.reset()
    twice = torch.compile(
        lambda x: (sampled_dropout(x, 0.5), sampled_dropout(x, 0.5)), fullgraph=True, backend="aot_eager"
    )
    first, second = twice(torch.ones(8, 64))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_torchs_own_checks_of_operators_pass():
    # The others run the operator twice, and compare
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(dropout_factors, (torch.ones(3, 4), 0.5), test_utils=utils)
