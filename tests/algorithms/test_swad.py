"""SWAD: the valley that it finds, on weights that are 1 after the first step, 2 after the second and so on."""

from statistics import fmean

import pytest

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.algorithms.test_averaging import Counter, run, value, weights
from timm_moe_dg.algorithms import AVERAGING

# Evaluations after steps 0, 2, 4, ...; three evaluations make a start, two above the threshold an end
SWAD = {"swad_n_converge": 3, "swad_n_tolerance": 2, "swad_tolerance_ratio": 0.5}


@pytest.mark.parametrize(
    ("losses", "rest", "first", "last"),
    [
        # Lowest at the third evaluation (step 4); threshold 1.5 * mean(2, 3, 4) = 4.5; the sixth and seventh are above
        ([9, 4, 2, 3, 4, 5, 6, 2, 2], 0, 4, 8),
        # One above does not end it, nor do two that are not in a row
        ([9, 4, 2, 3, 4, 5, 3, 6, 3], 0, 4, 16),
        # A second low after the start was found changes nothing
        ([9, 4, 2, 3, 4, 1, 5, 6], 0, 4, 10),
        # The run ends before the second one above: everything to its last step, evaluated or not
        ([9, 4, 2, 3, 4, 5], 1, 4, 11),
        # Equal losses do not fall below the first of them
        ([3, 3, 3, 3], 0, 0, 6),
        # Threshold 1.5 * mean(1, 5, 9) = 7.5: the third is above it when the start is found, the fourth is the second
        ([1, 5, 9, 9, 1], 0, 0, 2),
        # Still falling: from the lowest loss on
        ([9, 8, 7, 6, 5], 1, 8, 9),
        ([9, 8, 7, 6, 5, 6], 1, 8, 11),
    ],
)
def test_swad_averages_every_step_of_the_valley_once(losses, rest, first, last):
    average = run("swad", losses, rest=rest, **SWAD)
    assert value(average.final()) == pytest.approx(fmean(weights(first, last)))
    assert value(average.final()) == pytest.approx(fmean(weights(first, last)))  # looking changes nothing
    assert average.during() is None
    assert average._average.count <= last - first + 1


def test_swad_without_an_evaluation_is_nothing_and_without_a_valley_warns(caplog):
    for name in ("swad", "swad_released"):
        assert AVERAGING[name](Counter(), {}).final() is None
        with caplog.at_level("WARNING"):
            assert run(name, [3.0, 2.0, 1.0]).final() is not None
        assert "has not settled" in caplog.text
        caplog.clear()
