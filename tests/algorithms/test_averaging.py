"""Averages of weights, on a network of one weight that is 1 after the first step, 2 after the second and so on."""

import math
from statistics import fmean

import numpy as np
import pytest
import timm
import torch
from torch import nn

from timm_moe_dg.algorithms import AVERAGING
from timm_moe_dg.errors import DivergenceError


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def run(name, losses, every=2, rest=0, **hparams):
    """Evaluates after step 0 and then after every so many, as often as there are losses."""
    net = Counter()
    average = AVERAGING[name](net, hparams)
    evaluations = dict(zip(range(0, every * len(losses), every), losses, strict=True))
    for step in range(every * (len(losses) - 1) + 1 + rest):
        with torch.no_grad():
            net.value += 1
            net.seen += 1
        average.update(net, step)
        if step in evaluations:
            average.evaluated(step, evaluations[step])
    return average


def value(network):
    assert not network.training
    assert not network.value.requires_grad
    return network.value.item()


def weights(first, last):
    """After steps first..last, counted from 0."""
    return [step + 1 for step in range(first, last + 1)]


def test_exponential_average_from_the_starting_weights():
    average = run("ema", [1.0, 1.0], every=1, ema_decay=0.75)
    assert value(average.during()) == pytest.approx((0 * 0.75 + 1 * 0.25) * 0.75 + 2 * 0.25)
    assert average.final() is None


@pytest.mark.parametrize(("start", "expected"), [(1, fmean([1, 2, 3, 4, 5])), (3, fmean([3, 4, 5])), (9, 5)])
def test_moving_average_from_a_step_on(start, expected):
    average = run("moving", [1.0] * 5, every=1, sma_start_iter=start)
    assert value(average.during()) == pytest.approx(expected)
    assert average.during().seen == 5
    assert average.final() is None


@pytest.mark.parametrize("name", AVERAGING)
@pytest.mark.parametrize("model", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_mixture_is_averaged_after_training_forwards_routers_included(name, model):
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": (1,)}
    network = timm.create_model(model, num_classes=2, num_experts=3, **size).train()
    average = AVERAGING[name](network, {"sma_start_iter": 1, "swad_n_converge": 2})
    network(torch.randn(2, 3, 16, 16)).sum().backward()  # layers now hold a graph
    seen = []
    for step in range(3):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter))
        seen.append({key: parameter.detach().clone() for key, parameter in network.named_parameters()})
        average.update(network, step)
        average.evaluated(step, 1.0)
    found = average.during() or average.final()
    if name in ("moving", "swad"):
        for key, value in found.named_parameters():
            torch.testing.assert_close(value, sum(weights[key] for weights in seen) / 3)
    assert found(torch.randn(2, 3, 16, 16)).shape == (2, 2)


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


@pytest.mark.parametrize("name", ["swad", "swad_released"])
def test_swad_has_no_average_before_an_evaluation_warns_without_a_valley_and_refuses_nan(name, caplog):
    average = AVERAGING[name](Counter(), {})
    assert average.final() is None
    with caplog.at_level("WARNING"):
        assert run(name, [3.0, 2.0, 1.0]).final() is not None
    assert "has not settled" in caplog.text
    with pytest.raises(DivergenceError, match=r"^validation_loss=nan: "):
        average.evaluated(3, math.nan)


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


@pytest.mark.parametrize("levels", [2, 1000])  # with and without losses at the threshold
@pytest.mark.parametrize("tolerance", [1, 2, 3, 6])
def test_both_ways_of_swad_on_random_losses(tolerance, levels):
    random = np.random.RandomState(tolerance)
    converged = ended = 0
    numbers = {"swad_n_converge": 3, "swad_n_tolerance": tolerance, "swad_tolerance_ratio": 0.25}
    for _ in range(60):
        losses = np.abs(np.linspace(-1, 1, 14) * random.uniform(0, 4)) + random.uniform(0.5, 1.5, 14)
        losses = (np.round(losses * levels) / levels).tolist()
        start, end = paper_window(losses, 3, tolerance, 0.25)
        if start is not None:
            converged, ended = converged + 1, ended + (end is not None)
            last = 2 * (len(losses) - 1 if end is None else end)
            average = run("swad", losses, **numbers)
            assert value(average.final()) == pytest.approx(fmean(weights(2 * start, last)))
        segments = [fmean(weights(max(0, 2 * i - 1), 2 * i)) for i in range(len(losses))]
        expected = released_average(losses, segments, 3, tolerance, 0.25)
        assert value(run("swad_released", losses, **numbers).final()) == pytest.approx(expected)
    assert converged > 40
    assert ended > 3
