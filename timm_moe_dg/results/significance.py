"""Whether two rows differ by more than their seeds do: the paired sign-flip test (Fisher, 1935)."""

from collections.abc import Sequence

import numpy as np

EXACT = 16  # pairs; up to here every assignment of signs is tried
DRAWS, SEED = 99_999, 0
_TIES = 1e-12  # sums that differ by rounding alone are equal


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean of paired differences: the share of sign assignments whose mean is as far from 0.

    Under the hypothesis that neither row is better, each difference is as likely as its opposite. All 2^n assignments
    are tried up to 16 pairs, beyond that 99,999 random ones and the observed one. n pairs give no p below 2 / 2^n.

    Args:
        differences: One per pair; without any, or with a NaN, the result is NaN.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    values = np.asarray(differences, dtype=float)
    if not len(values) or np.isnan(values).any():
        return float("nan")
    if len(values) <= EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
    else:
        drawn = np.random.default_rng(SEED).choice((-1, 1), size=(DRAWS, len(values)))
        signs = np.vstack([np.ones(len(values), dtype=int), drawn])
    sums = np.abs(signs @ values)
    return float(np.mean(sums >= abs(values.sum()) - _TIES * np.abs(values).sum()))
