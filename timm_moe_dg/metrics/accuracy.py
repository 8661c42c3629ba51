"""Accuracy, over everything or group by group, from predictions and targets."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ._shapes import check_vectors


class GroupAccuracy(NamedTuple):
    """Accuracy of each group.

    Attributes:
        accuracy: Share of right predictions, float64 of shape (G,); NaN where a group is empty.
        num_samples: Number of samples, int64 of shape (G,).
    """

    accuracy: Tensor
    num_samples: Tensor


def accuracy(predicted: Tensor, target: Tensor) -> Tensor:
    """Share of samples whose predicted class is the target; a float64 scalar, NaN without samples.

    Args:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
    """
    group = torch.zeros_like(target)
    return group_accuracy(predicted, target, group, num_groups=1).accuracy[0]


def group_accuracy(predicted: Tensor, target: Tensor, group: Tensor, num_groups: int) -> GroupAccuracy:
    """Accuracy within each group, such as a domain.

    >>> group_accuracy(torch.tensor([1, 0, 2]), torch.tensor([1, 1, 2]), torch.tensor([0, 0, 2]), num_groups=3)
    GroupAccuracy(accuracy=tensor([0.5000,    nan, 1.0000], dtype=torch.float64), num_samples=tensor([2, 0, 1]))

    Args:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
        group: Group indices below `num_groups`, shape (N,).
        num_groups: G, counting groups that have no sample.

    Raises:
        ArgumentError: The shapes differ, or a group index is out of range.
    """
    check_vectors(predicted=predicted, target=target, group=group)
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < num_groups:
        raise ArgumentError.of("group", (int(group.min()), int(group.max())), f"lies outside 0..{num_groups - 1}")
    right = (predicted == target).double()
    num_samples = torch.bincount(group, minlength=num_groups)
    return GroupAccuracy(torch.bincount(group, weights=right, minlength=num_groups) / num_samples, num_samples)


def worst_group_accuracy(predicted: Tensor, target: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Accuracy of the group where it is lowest; empty groups do not count, and NaN says that all are empty.

    Arguments and errors as for `group_accuracy`.
    """
    each = group_accuracy(predicted, target, group, num_groups)
    present = each.accuracy[each.num_samples > 0]
    return present.min() if len(present) else torch.tensor(float("nan"), dtype=torch.float64)
