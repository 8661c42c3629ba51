"""Scores by class: which one is taken for which, and macro-averaged F1, iWildCam's metric."""

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


def f1_macro(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of F1 = 2 TP / (2 TP + FP + FN) over the classes that occur in the target.

    WILDS scores iWildCam so: it passes these classes to scikit-learn, `f1_score(target, predicted, average="macro",
    labels=unique(target))`. A class that is only predicted lowers the F1 of those that it is mistaken for, and has none
    of its own; scikit-learn without `labels` counts it as 0.

    >>> f1_macro(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])).item()
    0.833...

    Args:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).

    Returns:
        A float64 scalar; NaN without samples.

    Raises:
        ArgumentError: The shapes differ.
    """
    check_vectors(predicted=predicted, target=target)
    num_classes = 1 + int(torch.cat([predicted, target, target.new_tensor([-1])]).max())
    hits = torch.bincount(target[predicted == target], minlength=num_classes).double()
    targets = torch.bincount(target, minlength=num_classes)
    either = torch.bincount(predicted, minlength=num_classes) + targets
    return (2 * hits / either)[targets > 0].mean()
