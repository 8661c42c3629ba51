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
    counts = torch.bincount(rows * width + columns, minlength=(int(rows.max()) + 1) * width).view(-1, width)
    joint = counts.double() / len(first)
    marginals = joint.sum(1, keepdim=True), joint.sum(0, keepdim=True)
    entropies = [-torch.special.xlogy(share, share).sum() for share in marginals]
    if max(entropies) == 0:
        return torch.ones((), dtype=torch.float64)
    independent = marginals[0] * marginals[1]
    information = torch.special.xlogy(joint, joint / independent).sum()
    return (2 * information / (entropies[0] + entropies[1])).clamp(0.0, 1.0)
