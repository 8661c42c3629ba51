"""Confusion matrix against counting in plain Python."""

from collections import Counter

import pytest
import torch

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import accuracy, confusion_matrix


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
