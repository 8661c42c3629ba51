"""How strongly a table of counts ties its rows to its columns, such as parts of birds to experts.

Pure functions of tables: R rows, C columns. Permutation tests take the statistic under random exchanges for its null.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")


class PermutationTest(NamedTuple):
    """A statistic beside its distribution under random exchanges.

    Attributes:
        value: As observed.
        null: (R,) under R exchanges.
        p: (1 + number of null values that reach the observed one) / (1 + R).
    """

    value: float
    null: Tensor
    p: float


def permutation_test(value: Tensor, draw: Callable[[], Tensor], permutations: int) -> PermutationTest:
    """Compares a statistic, of which large values count, with draws under the null hypothesis.

    Args:
        value: A scalar.
        draw: Gives the statistic after one random exchange.
        permutations: R, at least 1.
    """
    return compared_with_null(value, torch.stack([draw() for _ in range(permutations)]))


def compared_with_null(value: Tensor, null: Tensor) -> PermutationTest:
    """Compares a statistic, of which large values count, with (R,) values under the null hypothesis; NaN has no p."""
    null = null.double()
    reached = int((null >= value.double() - 1e-12).sum())  # sums in another order must not break ties
    p = NAN if value.isnan() else (1 + reached) / (1 + len(null))
    return PermutationTest(float(value), null, p)


def row_shares(table: Tensor) -> Tensor:
    """(..., R, C) counts -> float64 shares of each row; NaN in a row without counts."""
    return table.double() / table.double().sum(-1, keepdim=True)


def lift(table: Tensor) -> Tensor:
    """Counts over what independence of rows and columns would give: (R, C) float64; NaN in empty rows and columns."""
    counts = table.double()
    expected = counts.sum(-1, keepdim=True) * counts.sum(-2, keepdim=True) / counts.sum()
    return torch.where(expected > 0, counts / expected, NAN)


def cramers_v(table: Tensor) -> Tensor:
    """Cramer's V of (R, C) counts, sqrt(chi2 / (n min(R - 1, C - 1))) without bias correction; empty lines left out.

    Returns:
        A float64 scalar in 0..1; NaN where fewer than two rows or columns have counts.
    """
    counts = table.double()
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    freedom = min(counts.shape) - 1
    if freedom < 1:
        return torch.tensor(NAN, dtype=torch.float64)
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    return (((counts - expected) ** 2 / expected).sum() / (counts.sum() * freedom)).sqrt()


def jensen_shannon_distance(first: Tensor, second: Tensor) -> Tensor:
    """Root of the Jensen-Shannon divergence in bits of two rows of counts (C,): 0 for equal shares, 1 for disjoint.

    Returns:
        A float64 scalar; NaN where a row is empty.
    """
    shares = row_shares(torch.stack([first, second]))
    entropy = torch.special.entr(shares).sum(-1)
    divergence = torch.special.entr(shares.mean(0)).sum() - entropy.mean()
    return (divergence.clamp(min=0.0) / torch.tensor(2.0, dtype=torch.float64).log()).sqrt()


def normalized_mutual_information(counts: Tensor) -> Tensor:
    """Mutual information of rows and columns over the mean of both entropies, for any number of tables at once.

    scikit-learn's normalized_mutual_info_score is the same for one table, but takes labels rather than counts.

    Args:
        counts: (..., R, C), not negative; empty rows and columns do not matter.

    Returns:
        float64 (...): 0 for independence, 1 for a one-to-one relation or a single cell; NaN for an empty table.
    """
    joint = counts.double() / counts.double().sum((-2, -1), keepdim=True)
    rows, columns, cells = (_entropy(shares) for shares in (joint.sum(-1), joint.sum(-2), joint.flatten(-2)))
    ratio = (2 * (rows + columns - cells) / (rows + columns)).clamp(0.0, 1.0)
    return ratio.where(rows + columns > 0, torch.where(cells.isnan(), cells, 1.0))


def _entropy(shares: Tensor) -> Tensor:
    return torch.special.entr(shares).sum(-1)
