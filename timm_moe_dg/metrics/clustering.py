"""Agreement of two groupings whose names need not match, such as discovered domains with regions."""

import torch
from torch import Tensor

from ._shapes import check_vectors


def normalized_mutual_information(first: Tensor, second: Tensor) -> Tensor:
    """Mutual information over the mean of both entropies (scikit-learn's default normalization).

    >>> normalized_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 3, 3])).item()
    1.0

    Args:
        first: Group indices, shape (N,); negative ones are names like any other.
        second: Group indices, shape (N,).

    Returns:
        A float64 scalar in 0..1: 0 for independent groupings, 1 for the same one under any names, and where both have
        a single group; NaN without samples.

    Raises:
        ArgumentError: The shapes differ.
    """
    check_vectors(first=first, second=second)
    if not len(first):
        return torch.tensor(float("nan"), dtype=torch.float64)
    rows, columns = (torch.unique(labels, return_inverse=True)[1] for labels in (first, second))
    width = int(columns.max()) + 1
    counts = torch.bincount(rows * width + columns, minlength=(int(rows.max()) + 1) * width)
    return normalized_mutual_information_of_counts(counts.view(-1, width))


def normalized_mutual_information_of_counts(counts: Tensor) -> Tensor:
    """`normalized_mutual_information` of the groupings that a table of counts crosses.

    Args:
        counts: (..., R, C) tables, not negative; rows and columns without a count have no part in it.

    Returns:
        float64 (...); NaN for a table without counts.
    """
    joint = counts.double() / counts.double().sum((-2, -1), keepdim=True)
    rows, columns, both = (_entropy(shares) for shares in (joint.sum(-1), joint.sum(-2), joint.flatten(-2)))
    agreement = (2 * (rows + columns - both) / (rows + columns)).clamp(0.0, 1.0)
    return agreement.where(rows + columns > 0, torch.where(both.isnan(), both, 1.0))


def _entropy(shares: Tensor) -> Tensor:
    return -torch.special.xlogy(shares, shares).sum(-1)
