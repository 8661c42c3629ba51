"""SWAD by the paper and by the released code, on weights that are 1 after the first step, 2 after the second, ..."""

import math
from statistics import fmean

import numpy as np
import pytest
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.algorithms.test_averaging import Counter, run, value, weights
from timm_moe_dg.algorithms import AVERAGING
from timm_moe_dg.errors import DivergenceError

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
        # Threshold 1.5 * mean(2, 2, 2) = 3: a loss at the threshold is in the valley
        ([9, 2, 2, 2, 3, 3, 9], 0, 2, 12),
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


@pytest.mark.parametrize("method", [AVERAGING["swad"], AVERAGING["swad_released"]])
def test_a_loss_that_is_no_number_ends_the_run_instead_of_the_search(method):
    average = method(torch.nn.Linear(1, 1), SWAD)
    average.evaluated(0, 1.0)
    with pytest.raises(DivergenceError, match="validation_loss=nan: no number at step 3"):
        average.evaluated(3, math.nan)


def test_swad_without_an_evaluation_is_nothing_and_without_a_valley_warns(caplog):
    for name in ("swad", "swad_released"):
        assert AVERAGING[name](Counter(), {}).final() is None
        with caplog.at_level("WARNING"):
            assert run(name, [3.0, 2.0, 1.0]).final() is not None
        assert "has not settled" in caplog.text
        caplog.clear()


# The released code, which differs


def paper_window(losses, converge, tolerance, ratio):
    """Start and end of the paper's algorithm 1, over evaluations; None where there is none."""
    start = end = threshold = None
    for i in range(len(losses)):
        if threshold is None:
            window = losses[i - converge + 1 : i + 1] if i >= converge - 1 else []
            if window and window[0] == min(window):
                start, threshold = i - converge + 1, (1 + ratio) * fmean(window)
        elif i >= tolerance - 1 and min(losses[i - tolerance + 1 : i + 1]) > threshold:
            end = i - tolerance
            break
    return start, end


def released_average(losses, segments, converge, tolerance, ratio):
    """The released code's bookkeeping with plain lists; a mean that has counted nothing is replaced by the next."""
    recent, smooth, members, initial, start, threshold = [], [], [], None, None, None
    for i in range(len(losses)):
        recent, smooth = [*recent, i][-converge:], [*smooth, i][-tolerance:]
        if start is None:
            if len(recent) < converge or int(np.argmin([losses[j] for j in recent])) != 0:
                continue
            start = initial = recent[0]
            threshold = (1 + ratio) * fmean(losses[j] for j in recent)
            if tolerance < converge:
                members += recent[1 : 1 + converge - tolerance]
            elif tolerance > converge:
                early, first = smooth[: tolerance - converge + 1], 0
                for position in reversed(range(len(early))):
                    if losses[early[position]] > threshold:
                        first = position + 1
                        break
                members += early[first + 1 :]
            continue
        if smooth[0] < start:
            continue
        if min(losses[j] for j in smooth) > threshold:
            return fmean(segments[j] for j in members or [initial])
        members.append(smooth[0])
    if start is None:
        return segments[len(losses) - 1]
    smooth = smooth[1:]
    while smooth and min(losses[j] for j in smooth) <= threshold:
        members.append(smooth.pop(0))
    return fmean(segments[j] for j in members or [initial])


@pytest.mark.parametrize("tolerance", [1, 2, 3, 6])
def test_both_ways_of_swad_on_random_losses(tolerance):
    random = np.random.RandomState(tolerance)
    converged = ended = 0
    for _ in range(60):
        losses = (np.abs(np.linspace(-1, 1, 14) * random.uniform(0, 4)) + random.uniform(0.5, 1.5, 14)).tolist()
        numbers = {"swad_n_converge": 3, "swad_n_tolerance": tolerance, "swad_tolerance_ratio": 0.3}
        start, end = paper_window(losses, 3, tolerance, 0.3)
        if start is not None:
            converged, ended = converged + 1, ended + (end is not None)
            last = 2 * (len(losses) - 1 if end is None else end)
            average = run("swad", losses, **numbers)
            assert value(average.final()) == pytest.approx(fmean(weights(2 * start, last)))
        segments = [fmean(weights(max(0, 2 * i - 1), 2 * i)) for i in range(len(losses))]
        expected = released_average(losses, segments, 3, tolerance, 0.3)
        assert value(run("swad_released", losses, **numbers).final()) == pytest.approx(expected)
    assert converged > 40
    assert ended > 3


@pytest.mark.parametrize("tolerance", [2, 4])
@pytest.mark.parametrize("losses", [[3, 2, 2, 2, 3, 3, 9, 9, 2], [4, 3, 2, 2, 2, 4, 3], [2, 2, 2, 9, 3, 9, 3, 3]])
def test_a_loss_at_the_threshold_is_in_the_valley_of_the_released_code_too(losses, tolerance):
    segments = [fmean(weights(max(0, 2 * i - 1), 2 * i)) for i in range(len(losses))]
    average = run("swad_released", losses, **{**SWAD, "swad_n_tolerance": tolerance})  # the threshold is 1.5 * 2
    expected = released_average(losses, segments, 3, tolerance, 0.5)
    assert value(average.final()) == pytest.approx(expected)


def test_released_swad_counts_the_segment_of_convergence_twice():
    # Converges at the 6th evaluation with the 4th (step 6) as lowest; mean(2, 2.1, 2.2) * 1.3 = 2.73. Of the queue up
    # to it, the 2nd is above, the 3rd is left out, the 4th enters; it enters again when it is the oldest of six, then
    # the 5th. At the end the oldest, the 5th, is dropped from the queue, and the other five enter.
    losses = [9, 8, 2.5, 2, 2.1, 2.2, 2.3, 2.3, 2.3, 2.3]
    segments = [fmean(weights(max(0, 2 * i - 1), 2 * i)) for i in range(len(losses))]
    average = run("swad_released", losses)
    assert value(average.final()) == pytest.approx(fmean(segments[i] for i in (3, 3, 4, 5, 6, 7, 8, 9)))
