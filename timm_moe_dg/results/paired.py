"""Paired comparison of a table's rows: the same seed and domain, one row's number less the other's.

Means of a few seeds with standard errors hide that two rows share their seeds and domains: hard domains lower both. A
paired test looks at the differences alone.
"""

from collections.abc import Sequence
from itertools import combinations
from math import isnan
from statistics import fmean
from typing import NamedTuple

import numpy as np

from .columns import AVERAGE, Cell
from .runs import RowKey
from .tables import AVERAGES, OFFICIAL, SINGLE_SOURCE, Table

EXACT = 16  # pairs up to which all 2^n signs are tried
DRAWS = 99_999  # of signs, for more pairs


class PairedTest(NamedTuple):
    """What is known about the difference of two rows.

    Attributes:
        first: A row.
        second: Another one.
        of: Which columns the pairs come from.
        differences: The first row's number less the second's, share, one per seed and column that both have.
        p: See `sign_flip_p`.
        adjusted: `p` after Holm's correction for all pairs of rows; see `holm`.
    """

    first: RowKey
    second: RowKey
    of: str
    differences: tuple[float, ...]
    p: float
    adjusted: float

    @property
    def mean(self) -> float:
        """Mean difference."""
        return fmean(self.differences)

    @property
    def wins(self) -> int:
        """Pairs in which the first row is ahead."""
        return sum(value > 0 for value in self.differences)

    @property
    def losses(self) -> int:
        """Pairs in which the second row is ahead."""
        return sum(value < 0 for value in self.differences)


def sign_flip_p(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p value of a sign-flip permutation test of a mean difference of 0.

    If neither row is better, each difference could as well have the other sign. The p value is the share of all sign
    patterns whose mean is at least as far from 0 as the one that was found (Fisher's randomization test): of all 2^n up
    to `EXACT` pairs, else of `DRAWS` random ones and the one found. The smallest p value of n pairs is 2 / 2^n.
    Pairs are taken as independent, which those of different domains with the same seed are not quite.

    Args:
        differences: At least one.
        seed: Of the random patterns.
    """
    values = np.asarray(differences, dtype=float)
    found = abs(values.sum()) * (1 - 1e-12)  # patterns of equal sums differ by rounding
    if len(values) <= EXACT:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float((abs(sums) >= found).mean())
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (DRAWS, len(values)))
    return float((1 + (abs(signs @ values) >= found).sum()) / (1 + DRAWS))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p values for their number, so that the chance of any false finding stays below the level (Holm, 1979)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=lambda at: p_values[at])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = highest
    return adjusted


def paired_tests(table: Table) -> list[PairedTest]:
    """Tests every two rows of a table; pairs are the seeds and domains that both have.

    Scores on the data's own test domains are of different kinds, so that each column is tested for itself.
    """
    found = []
    for of, columns in _measured(table).items():
        compared = []
        for first, second in combinations(table.rows, 2):
            pairs = [(table.rows[first][at], table.rows[second][at]) for at in columns]
            differences = tuple(value for pair in pairs for value in _differences(*pair))
            if differences:
                compared.append((first, second, of, differences, sign_flip_p(differences)))
        adjusted = holm([p for *_, p in compared])
        found += [PairedTest(*each, value) for each, value in zip(compared, adjusted, strict=True)]
    return found


def _measured(table: Table) -> dict[str, Sequence[int]]:
    """The columns that are tested together, by what they are called."""
    if table.dataset == AVERAGES:
        return {}
    if table.rule == OFFICIAL:
        return {title: [at] for at, title in enumerate(table.columns)}
    if table.rule == SINGLE_SOURCE:
        return {"domains not trained on": range(1, len(table.columns) - 1)}
    return {"held-out domains": range(list(table.columns).index(AVERAGE))}


def _differences(first: Cell, second: Cell) -> list[float]:
    """By seed; a seed that one of them lacks is left out, and so is one without images to score."""
    both = [first.values[seed] - second.values[seed] for seed in first.values if seed in second.values]
    return [value for value in both if not isnan(value)]
