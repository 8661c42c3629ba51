"""What dropout loses: each place by itself at the rate that was asked for, in any layout, the same for a seed."""

import numpy as np
import pytest
import torch
from scipy import stats

from timm_moe_dg.layers.sorted_path.activations import LOST
from timm_moe_dg.layers.sorted_path.dropout import HiddenDropout, draw_seed, lose, lost_places

CPU = torch.device("cpu")


def mask_of(size, rate, seed):
    places = lost_places(size, rate, torch.Generator().manual_seed(seed))
    assert (places.diff() > 0).all()
    return torch.zeros(size).index_fill_(0, places, 1)


@pytest.mark.parametrize("rate", [2**-10, 0.1, 0.5, 0.9])
def test_steps_between_lost_places_are_geometric(rate):
    size = int(100_000 / rate)
    places = lost_places(size, rate, torch.Generator().manual_seed(0))
    steps = torch.cat([places[:1] + 1, places.diff()]).numpy()
    # bins of about equal probability, the last one open
    ends = sorted({int(stats.geom.ppf(quantile, rate)) for quantile in np.linspace(0.02, 0.98, 25)})
    found = np.bincount(np.searchsorted(ends, steps), minlength=len(ends) + 1)
    expected = len(steps) * np.diff([0, *stats.geom.cdf(ends, rate), 1])
    assert stats.chisquare(found, expected).pvalue > 1e-4


@pytest.mark.parametrize(("size", "rate"), [(1, 0.3), (7, 0.5), (50, 0.02), (400, 0.9)])
def test_the_number_of_lost_places_and_each_place_have_the_rate_in_small_tensors_too(size, rate):
    draws = 4000
    masks = torch.stack([mask_of(size, rate, seed) for seed in range(draws)])
    # five deviations of a mean over all draws; of single places, six, as there are many of them
    assert abs(masks.mean() - rate) < 5 * (rate * (1 - rate) / masks.numel()) ** 0.5
    assert (masks.mean(0) - rate).abs().max() < 6 * (rate * (1 - rate) / draws) ** 0.5
    variance = size * rate * (1 - rate)  # of the binomial distribution
    assert masks.sum(1).var().item() == pytest.approx(variance, rel=0.15)


def test_places_do_not_depend_on_each_other():
    deviation = mask_of(400_000, 0.3, seed=0) - 0.3
    for distance in (1, 2, 3, 4, 5, 8):
        # the product of two independent deviations has a standard deviation of 0.21
        assert (deviation[distance:] * deviation[:-distance]).mean().abs() < 5 * 0.21 / 400_000**0.5


@pytest.mark.parametrize("rate", [1e-30, 1e-12, 1.0])
def test_nothing_and_everything(rate):
    assert mask_of(100, rate, seed=0).eq(rate == 1).all()
    assert mask_of(0, rate, seed=0).numel() == 0
    assert HiddenDropout(1.0, 0).scale == 0


@pytest.mark.parametrize("gate", [None, 0, 1])
def test_places_and_masks_mean_the_same_in_either_half_of_the_features(gate):
    rows, width = 6, 5
    features = torch.zeros(rows, width if gate is None else 2 * width)
    half = features if gate is None else features.chunk(2, dim=1)[gate]
    mask = torch.arange(rows * width).view(rows, width) % 3 == 1
    lose(half, mask.flatten().nonzero().flatten())
    assert torch.equal(half == LOST, mask)
    assert features.ne(0).sum() == mask.sum()
    other = torch.zeros_like(half)
    lose(other, mask)
    assert torch.equal(other, half)


def test_each_expert_loses_its_part_of_what_all_lose_together():
    sizes, width = [3, 0, 4, 1], 50
    dropout = HiddenDropout(0.4, seed=5)
    parts = [torch.zeros(size, width) for size in sizes]
    for part, lost in zip(parts, dropout.lost(sizes, width, CPU), strict=True):
        lose(part, lost)
    (whole,) = dropout.lost([sum(sizes)], width, CPU)
    expected = torch.zeros(sum(sizes), width)
    lose(expected, whole)
    assert torch.equal(torch.cat(parts), expected)
    assert expected.ne(0).any()


def test_a_seed_follows_torchs_generator_and_leaves_it_alone_afterwards():
    torch.manual_seed(3)
    first, second = draw_seed(), draw_seed()
    assert first != second
    torch.manual_seed(3)
    assert draw_seed() == first
    state = torch.get_rng_state()
    same = [HiddenDropout(0.2, int(first)).lost([40], 10, CPU)[0] for _ in range(2)]
    assert torch.equal(*same)
    assert torch.equal(torch.get_rng_state(), state)


def test_defaults_of_device_and_type_have_no_part_in_it():
    torch.manual_seed(3)
    seed = draw_seed()
    expected = HiddenDropout(0.2, int(seed)).lost([40, 3], 10, CPU)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert draw_seed() == seed
            found = HiddenDropout(0.2, int(seed)).lost([40, 3], 10, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, expected))
