"""Accuracy against counting in plain Python."""

import math
from fractions import Fraction

import pytest
import torch

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import accuracy, group_accuracy, worst_group

GROUPS = 6


@pytest.fixture
def sample():
    """Predictions right about half the time; groups 2 and 5 are empty."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(3, (101,), generator=generator)
    predicted = torch.where(torch.rand(101, generator=generator) < 0.5, target, (target + 1) % 3)
    group = torch.tensor([0, 1, 3, 4])[torch.randint(4, (101,), generator=generator)]
    return predicted, target, group


def counted(predicted, target, group, wanted):
    rows = [row for row in zip(predicted.tolist(), target.tolist(), group.tolist(), strict=True) if row[2] == wanted]
    return len(rows), Fraction(sum(row[0] == row[1] for row in rows), len(rows)) if rows else None


def test_groups_are_counted_one_by_one(sample):
    result = group_accuracy(*sample, num_groups=GROUPS)
    for wanted in range(GROUPS):
        number, share = counted(*sample, wanted)
        assert result.num_samples[wanted] == number
        if share is None:
            assert math.isnan(result.accuracy[wanted])
        else:
            assert result.accuracy[wanted].item() == float(share)
    assert result.num_samples.sum() == 101


def test_accuracy_is_the_mean_weighted_by_group_size(sample):
    predicted, target, _ = sample
    right = sum(a == b for a, b in zip(predicted.tolist(), target.tolist(), strict=True))
    assert accuracy(predicted, target).item() == right / 101


def test_worst_group_passes_over_empty_groups(sample):
    shares = [share for wanted in range(GROUPS) if (share := counted(*sample, wanted)[1]) is not None]
    assert worst_group(*sample, num_groups=GROUPS).accuracy == float(min(shares))


def test_order_does_not_matter(sample):
    order = torch.randperm(101, generator=torch.Generator().manual_seed(1))
    shuffled = group_accuracy(*(tensor[order] for tensor in sample), num_groups=GROUPS)
    torch.testing.assert_close(
        shuffled.accuracy, group_accuracy(*sample, GROUPS).accuracy, equal_nan=True, rtol=0, atol=0
    )


def test_without_samples_everything_is_nan():
    empty = torch.zeros(0, dtype=torch.int64)
    assert math.isnan(accuracy(empty, empty))
    assert math.isnan(worst_group(empty, empty, empty, num_groups=2).accuracy)
    assert group_accuracy(empty, empty, empty, num_groups=2).num_samples.tolist() == [0, 0]


@pytest.mark.parametrize("group", [[0, 1, 6], [0, -1, 2]], ids=str)
def test_group_out_of_range(group):
    labels = torch.tensor([0, 1, 2])
    with pytest.raises(ArgumentError, match=r"lies outside 0\.\.5"):
        group_accuracy(labels, labels, torch.tensor(group), num_groups=GROUPS)


def test_logits_in_place_of_predictions():
    labels = torch.tensor([0, 1, 2])
    with pytest.raises(ArgumentError, match="three vectors of equal length"):
        group_accuracy(torch.zeros(3, 4), labels, labels, num_groups=3)


def test_the_worst_group_comes_with_its_size() -> None:
    # group 0: 2 of 3 right, group 1: none of 2, group 2: empty, group 3: 1 of 1
    predicted = torch.tensor([0, 1, 2, 0, 0, 3])
    target = torch.tensor([0, 1, 0, 1, 2, 3])
    group = torch.tensor([0, 0, 0, 1, 1, 3])
    assert worst_group(predicted, target, group, 4) == (0.0, 1, 2)
    accuracy, index, number = worst_group(predicted, target, group, 4, ignored=[1])
    assert (accuracy, index, number) == (pytest.approx(2 / 3), 0, 3)


def test_without_a_group_that_counts_the_worst_is_unknown() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    accuracy, index, number = worst_group(empty, empty, empty, 2)
    assert math.isnan(accuracy)
    assert (index, number) == (-1, 0)
    one = torch.ones(1, dtype=torch.long)
    assert worst_group(one, one, one, 2, ignored=[1]).group == -1
    with pytest.raises(ArgumentError, match="ignored"):
        worst_group(one, one, one, 2, ignored=[2])
