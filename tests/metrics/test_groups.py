"""Worst group, F1-macro and agreement of groupings: by hand and against scikit-learn."""

import math

import pytest
import torch
from sklearn.metrics import f1_score, normalized_mutual_info_score

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import f1_macro, normalized_mutual_information, worst_group


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


@pytest.mark.parametrize("seed", range(3))
def test_f1_equals_scikit_learns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    predicted = torch.randint(0, 9, (60,), generator=generator)
    target = torch.randint(3, 12, (60,), generator=generator)  # some classes are never a target, some never predicted
    expected = f1_score(target.numpy(), predicted.numpy(), average="macro", zero_division=0)
    assert f1_macro(predicted, target).item() == pytest.approx(expected, abs=1e-12)


def test_f1_by_hand_and_at_its_ends() -> None:
    # class 0: TP 1, FP 0, FN 1 -> 2/3; class 1: TP 1, FP 1, FN 0 -> 2/3
    assert f1_macro(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).item() == pytest.approx(2 / 3)
    assert f1_macro(torch.tensor([4, 4]), torch.tensor([4, 4])).item() == 1.0
    assert f1_macro(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)).isnan()
    with pytest.raises(ArgumentError, match="predicted"):
        f1_macro(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("seed", range(3))
def test_agreement_equals_scikit_learns(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 5, (80,), generator=generator)
    second = torch.where(torch.rand(80, generator=generator) < 0.6, first * 7 - 3, 40 + first // 2)
    expected = normalized_mutual_info_score(first.numpy(), second.numpy())
    assert normalized_mutual_information(first, second).item() == pytest.approx(expected, abs=1e-12)


def test_agreement_at_its_ends() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    assert normalized_mutual_information(labels, 5 - labels).item() == pytest.approx(1.0, abs=1e-12)
    # every combination once: independent
    assert normalized_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])).item() == 0.0
    assert normalized_mutual_information(torch.zeros(4), labels[:4]).item() == 0.0
    assert normalized_mutual_information(torch.zeros(4), torch.ones(4)).item() == 1.0
    assert normalized_mutual_information(torch.zeros(0), torch.zeros(0)).isnan()
    with pytest.raises(ArgumentError, match="first, second"):
        normalized_mutual_information(torch.zeros(2), torch.zeros(3))
