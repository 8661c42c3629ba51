"""Which class is taken for which."""

import torch
from torch import Tensor

from ..errors import ArgumentError
from ._shapes import check_vectors


def confusion_matrix(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Counts how often a target (row) got a prediction (column).

    >>> confusion_matrix(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])

    Args:
        predicted: Class indices below `num_classes`, shape (N,).
        target: Class indices below `num_classes`, shape (N,).
        num_classes: C.

    Returns:
        int64 (C, C).

    Raises:
        ArgumentError: The shapes differ, or a class index is out of range.
    """
    check_vectors(predicted=predicted, target=target)
    for name, indices in (("predicted", predicted), ("target", target)):
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < num_classes:
            extremes = int(indices.min()), int(indices.max())
            raise ArgumentError.of(name, extremes, f"lies outside 0..{num_classes - 1}")
    cells = torch.bincount(target * num_classes + predicted, minlength=num_classes**2)
    return cells.view(num_classes, num_classes)
