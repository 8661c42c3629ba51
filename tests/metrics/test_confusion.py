"""Confusion matrix against counting in plain Python, F1-macro by hand and against scikit-learn as WILDS calls it."""

from collections import Counter

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import accuracy, confusion_matrix, f1_macro


def test_every_cell_is_counted():
    generator = torch.Generator().manual_seed(0)
    predicted, target = (torch.randint(4, (80,), generator=generator) for _ in range(2))
    counts = Counter(zip(target.tolist(), predicted.tolist(), strict=True))
    matrix = confusion_matrix(predicted, target, num_classes=5)
    assert matrix.shape == (5, 5)
    assert all(matrix[row, column] == counts[row, column] for row in range(5) for column in range(5))
    assert matrix.diagonal().sum().item() / matrix.sum().item() == accuracy(predicted, target).item()
    assert torch.equal(confusion_matrix(target, predicted, 5), matrix.T)


def test_without_samples_everything_is_zero():
    empty = torch.tensor([], dtype=torch.long)
    assert torch.equal(confusion_matrix(empty, empty, 2), torch.zeros(2, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("predicted", "target", "message"),
    [([3], [0], r"predicted=\(3, 3\): lies outside 0..2"), ([0], [-1], "target="), ([0, 1], [0], "two vectors")],
)
def test_mistakes_are_named(predicted, target, message):
    with pytest.raises(ArgumentError, match=message):
        confusion_matrix(torch.tensor(predicted), torch.tensor(target), num_classes=3)


@pytest.mark.slow
def test_f1_equals_what_wilds_asks_scikit_learn_for() -> None:
    """Up to 182 classes, as iWildCam has, of which few may occur; some are only predicted, some never predicted."""
    random = np.random.default_rng(0)
    only_predicted = 0
    for _ in range(1000):
        classes, number = random.integers(1, 183), random.integers(1, 60)
        present = random.choice(classes, random.integers(1, classes + 1), replace=False)
        target = random.choice(present, number)
        predicted = np.where(random.random(number) < random.random(), target, random.integers(0, classes, number))
        labels = np.unique(target)
        expected = f1_score(target, predicted, average="macro", labels=labels, zero_division=0)
        assert f1_macro(torch.tensor(predicted), torch.tensor(target)).item() == pytest.approx(expected, abs=1e-12)
        only_predicted += len(np.setdiff1d(predicted, labels)) > 0
    assert only_predicted > 500


def test_a_class_that_is_only_predicted_has_no_f1_of_its_own() -> None:
    # class 0: TP 1, FN 1 -> 2/3; class 1: TP 1 -> 1; class 2 is no target
    assert f1_macro(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])).item() == pytest.approx((2 / 3 + 1) / 2)
    assert f1_macro(torch.tensor([5]), torch.tensor([2])).item() == 0.0


def test_f1_by_hand_and_at_its_ends() -> None:
    # class 0: TP 1, FP 0, FN 1 -> 2/3; class 1: TP 1, FP 1, FN 0 -> 2/3
    assert f1_macro(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).item() == pytest.approx(2 / 3)
    assert f1_macro(torch.tensor([4, 4]), torch.tensor([4, 4])).item() == 1.0
    assert f1_macro(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)).isnan()
    with pytest.raises(ArgumentError, match="predicted"):
        f1_macro(torch.zeros(2), torch.zeros(3))
