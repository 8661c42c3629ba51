"""The group where a model is worst, with its size: an accuracy of few samples is not much of a statement."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from .accuracy import group_accuracy


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
