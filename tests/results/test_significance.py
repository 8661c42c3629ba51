"""The sign-flip test against scipy's, against counting by hand, and against what it must not depend on."""

from itertools import product
from math import isnan, nan

import numpy as np
import pytest
from scipy.stats import permutation_test

from timm_moe_dg.results.significance import sign_flip_p


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_it_agrees_with_scipy_and_with_counting(size):
    values = np.random.default_rng(size).normal(0.4, 1, size)
    signs = product((1, -1), repeat=size)
    sums = [sum(sign * value for sign, value in zip(row, values, strict=True)) for row in signs]
    counted = np.mean([abs(total) >= abs(sum(values)) - 1e-9 for total in sums])
    assert sign_flip_p(values) == pytest.approx(counted)
    if size > 1:
        reference = permutation_test(
            (values,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
        )
        assert sign_flip_p(values) == pytest.approx(reference.pvalue)


def test_no_p_is_below_what_the_number_of_pairs_allows_and_ties_count():
    assert sign_flip_p([0.1, 0.2, 0.3]) == 0.25
    assert sign_flip_p([0.1] * 5) == 2 / 2**5
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip_p([-1, -2, 3.5, 1]) == sign_flip_p([1, 2, -3.5, -1])


def test_many_pairs_are_drawn_and_the_result_is_repeatable_and_near_the_exact_one():
    values = [0.5, -0.2] * 8
    exact, drawn = sign_flip_p(values), sign_flip_p([*values, 0.0])  # a difference of 0 changes nothing
    assert drawn == sign_flip_p([*values, 0.0])
    assert drawn == pytest.approx(exact, abs=0.005)  # three standard errors of 99,999 draws


def test_without_pairs_there_is_no_p():
    assert isnan(sign_flip_p([]))
    assert isnan(sign_flip_p([0.1, nan]))
