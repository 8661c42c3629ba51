"""Paired comparison of a table's rows: the same seed and domain, one row's number less the other's.

Means of a few seeds with standard errors hide that two rows share their seeds and domains: hard domains lower both. A
paired test looks at the differences alone.
"""

from collections.abc import Sequence
from itertools import combinations
from math import isnan
from statistics import fmean
from typing import NamedTuple

from .columns import AVERAGE, paired_differences
from .runs import RowKey
from .significance import sign_flip_p
from .tables import AVERAGES, OFFICIAL, SINGLE_SOURCE, Table


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
            every = [value for pair in pairs for value in paired_differences(*pair).values()]
            differences = tuple(value for value in every if not isnan(value))  # a domain may have no image to score
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
