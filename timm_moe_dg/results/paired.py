"""Paired comparison of table rows by a sign-flip permutation test."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.stats import permutation_test

from .runs import RowKey
from .table_columns import AVERAGE
from .tables import AVERAGES, OFFICIAL_RULES, SINGLE_SOURCE, Table

_RESAMPLES, _SEED = 99_999, 0


class PairedTest(NamedTuple):
    """Test of the difference between two rows."""

    first: RowKey
    second: RowKey
    of: str  # which columns the pairs come from
    differences: tuple[float, ...]  # first row minus second, as shares, one per seed and column of both
    p: float  # see `sign_flip_p`
    adjusted: float  # `p` after Holm's correction for all pairs of rows

    @property
    def mean(self) -> float:
        """Mean difference."""
        return fmean(self.differences)

    @property
    def wins(self) -> int:
        """Number of pairs in which the first row is better."""
        return sum(value > 0 for value in self.differences)

    @property
    def losses(self) -> int:
        """Number of pairs in which the second row is better."""
        return sum(value < 0 for value in self.differences)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p value of the mean of paired differences, by a sign-flip permutation test (Fisher, 1935).

    If neither row is better, each difference is as likely as its negative. The p value is the share of sign patterns
    whose mean is at least as far from 0. Up to n = 16 pairs all 2^n patterns are counted, beyond that 99,999 random
    ones. The p value of n pairs is at least 2 / 2^n. Without any pair, or with a NaN, the result is NaN.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    if not len(differences) or np.isnan(differences).any():
        return float("nan")
    if len(differences) == 1:  # scipy needs two observations
        return 1.0
    test = permutation_test(
        (np.asarray(differences),),
        _rounded_mean,
        permutation_type="samples",
        n_resamples=_RESAMPLES,  # scipy counts all patterns if there are no more than that
        rng=np.random.default_rng(_SEED),
    )
    return float(test.pvalue)


def _rounded_mean(values: np.ndarray, axis: int) -> np.ndarray:
    # Accuracies are fractions, so many patterns have the same mean. Rounding keeps such ties despite float errors.
    return np.mean(values, axis=axis).round(12)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p values so that the chance of any false rejection stays below the level (Holm, 1979)."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def paired_tests(table: Table) -> list[PairedTest]:
    """Tests every pair of rows of a table with the same data, over the seeds and domains that both rows have."""
    # Pairs, not the means of two rows: a hard domain lowers both values of a pair, but not their difference
    shares, tests = table.scores.unstack("row"), []
    pairs = [pair for pair in combinations(table.rows, 2) if {*pair} <= {*shares} and not table.on_other_data(*pair)]
    for title, columns in _tested_columns(table).items():
        tested = shares[shares.index.get_level_values("column").isin(columns)]
        differences = {pair: tuple((tested[pair[0]] - tested[pair[1]]).dropna()) for pair in pairs}
        p_values = {pair: sign_flip_p(values) for pair, values in differences.items() if values}
        adjusted = holm(list(p_values.values()))
        tests += [
            PairedTest(*pair, title, differences[pair], p, value)
            for (pair, p), value in zip(p_values.items(), adjusted, strict=True)
        ]
    return tests


def _tested_columns(table: Table) -> dict[str, Sequence[int]]:
    """Positions of the columns that are tested together, by their common title."""
    if table.dataset == AVERAGES:
        return {}
    if table.rule in OFFICIAL_RULES:
        # Accuracy, worst group and F1 are different scores: each column is a test of its own.
        return {title: [column] for column, title in enumerate(table.columns)}
    if table.rule == SINGLE_SOURCE:
        return {"domains not trained on": range(1, len(table.columns) - 1)}
    return {"held-out domains": range(list(table.columns).index(AVERAGE))}
