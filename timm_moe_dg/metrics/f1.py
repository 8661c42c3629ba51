"""Macro-averaged F1, iWildCam's metric."""

import torch
from torch import Tensor

from ._shapes import check_vectors


def f1_macro(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean over classes of F1 = 2 TP / (2 TP + FP + FN), over those classes that are a target or predicted.

    As scikit-learn's `f1_score(average="macro")`, which WILDS uses, computes it without a list of classes.

    >>> f1_macro(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).item()
    0.666...

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
    either = torch.bincount(predicted, minlength=num_classes) + torch.bincount(target, minlength=num_classes)
    return (2 * hits / either)[either > 0].mean()
