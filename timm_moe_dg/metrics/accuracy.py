"""Accuracy: over everything, group by group, and of the worst group with its size.

The size belongs to it: an accuracy of few samples is not much of a statement.
"""

from collections.abc import Sequence
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


class WorstGroup(NamedTuple):
    """The group with the lowest accuracy.

    Attributes:
        accuracy: Its accuracy; NaN where every group is empty.
        group: Its index; -1 where every group is empty.
        num_samples: How many samples it has.
    """

    accuracy: float
    group: int
    num_samples: int


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


def worst_group(
    predicted: Tensor, target: Tensor, group: Tensor, num_groups: int, ignored: Sequence[int] = ()
) -> WorstGroup:
    """Finds the group with the lowest accuracy, the first of equals; empty groups do not count.

    >>> worst_group(torch.tensor([1, 0, 2]), torch.tensor([1, 1, 2]), torch.tensor([0, 0, 2]), num_groups=3)
    WorstGroup(accuracy=0.5, group=0, num_samples=2)

    Args:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
        group: Group indices below `num_groups`, shape (N,).
        num_groups: G, counting groups that have no sample.
        ignored: Groups that cannot be the worst, such as FMoW's "Other".

    Raises:
        ArgumentError: The shapes differ, or a group index is out of range.
    """
    if any(not 0 <= index < num_groups for index in ignored):
        raise ArgumentError.of("ignored", list(ignored), f"name groups out of 0..{num_groups - 1}")
    each = group_accuracy(predicted, target, group, num_groups)
    counted = each.num_samples > 0
    counted[list(ignored)] = False
    if not counted.any():
        return WorstGroup(float("nan"), -1, 0)
    index = int(each.accuracy.masked_fill(~counted, torch.inf).argmin())
    return WorstGroup(each.accuracy[index].item(), index, int(each.num_samples[index]))
