"""Statistics of tables of counts, such as parts of birds (R rows) against experts (C columns), and their tests."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class PermutationTest(NamedTuple):
    """A statistic and its null distribution."""

    value: float  # observed
    null: Tensor  # (P,) values under P random exchanges
    p: float  # (1 + number of null values >= the observed one) / (1 + P); NaN for a NaN value


def permutation_test(value: Tensor, null: Tensor) -> PermutationTest:
    """Tests whether a scalar statistic is larger than its (P,) values under the null hypothesis."""
    null = null.double()
    # The tolerance keeps ties: the same terms summed in another order differ in the last bits
    reached = int((null >= value.double() - 1e-12).sum())
    p = math.nan if value.isnan() else (1 + reached) / (1 + len(null))
    return PermutationTest(float(value), null, p)


def lift(counts: Tensor) -> Tensor:
    """Counts over those expected under independence: (R, C) float64; NaN in empty rows and columns."""
    from scipy.stats.contingency import expected_freq

    return counts.double() / torch.from_numpy(expected_freq(counts.numpy()))


def cramers_v(counts: Tensor) -> float:
    """sqrt(chi2 / (n min(R - 1, C - 1))) of (R, C) counts without their empty rows and columns, 0 to 1.

    There is no bias correction. With fewer than two rows or columns the result is NaN.
    """
    from scipy.stats.contingency import association

    table = counts.long()
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(association(table.numpy(), method="cramer")) if min(table.shape) > 1 else math.nan


def jensen_shannon_distance(first: Tensor, second: Tensor) -> float:
    """Square root of the Jensen-Shannon divergence, in bits, of two rows of counts (C,); NaN if a row is empty."""
    from scipy.spatial.distance import jensenshannon

    if not (first.any() and second.any()):
        return math.nan
    return float(jensenshannon(first.numpy(), second.numpy(), base=2))


def normalized_mutual_information(counts: Tensor) -> Tensor:
    """Mutual information of rows and columns over the mean of both entropies: (..., R, C) counts -> float64 (...).

    0 for independence, 1 for a one-to-one relation or a single cell, NaN for an empty table.
    """
    # scikit-learn's function takes the labels of one table, and a permutation test has many tables
    joint = counts.double() / counts.double().sum((-2, -1), keepdim=True)
    parts = (joint.sum(-1), joint.sum(-2), joint.flatten(-2))
    rows, columns, cells = (torch.special.entr(shares).sum(-1) for shares in parts)
    ratio = (2 * (rows + columns - cells) / (rows + columns)).clamp(0.0, 1.0)
    # A table with one row and one column has no entropy: 0 / 0
    return ratio.where(rows + columns > 0, torch.where(cells.isnan(), cells, 1.0))
