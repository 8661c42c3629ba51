"""Expected calibration error against a slow loop and against closed forms."""

import math

import pytest
import torch

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import calibration_bins, expected_calibration_error


def slow(confidence, correct, num_bins):
    total = 0.0
    for number in range(1, num_bins + 1):
        low, high = (number - 1) / num_bins, number / num_bins
        inside = [
            (sure, right)
            for sure, right in zip(confidence.tolist(), correct.tolist(), strict=True)
            if low < sure <= high or (sure == 0 and number == 1)
        ]
        if inside:
            accuracy = sum(right for _, right in inside) / len(inside)
            mean = sum(sure for sure, _ in inside) / len(inside)
            total += len(inside) / len(confidence) * abs(accuracy - mean)
    return total


@pytest.mark.parametrize("num_bins", [1, 2, 15, 40])
def test_against_a_loop_over_bins(num_bins):
    generator = torch.Generator().manual_seed(num_bins)
    edges = torch.arange(0, 16, dtype=torch.float64) / 15  # values that lie on a border belong to the bin below it
    confidence = torch.cat([torch.rand(300, generator=generator, dtype=torch.float64), edges])
    correct = torch.rand(len(confidence), generator=generator) < confidence**2
    error = expected_calibration_error(confidence, correct, num_bins).item()
    assert error == pytest.approx(slow(confidence, correct, num_bins), abs=1e-12)


def test_opposite_gaps_cancel_within_a_bin_but_not_between_bins():
    confidence, correct = torch.tensor([0.25, 0.75]), torch.tensor([True, False])
    assert expected_calibration_error(confidence, correct, num_bins=1).item() == pytest.approx(0.0)
    assert expected_calibration_error(confidence, correct, num_bins=2).item() == pytest.approx(0.75)


def test_order_does_not_matter_and_nothing_is_nan():
    generator = torch.Generator().manual_seed(0)
    confidence, correct = torch.rand(50, generator=generator), torch.rand(50, generator=generator) < 0.5
    order = torch.randperm(50, generator=generator)
    in_order, shuffled = (
        expected_calibration_error(confidence[rows], correct[rows]).item() for rows in (slice(None), order)
    )
    assert in_order == pytest.approx(shuffled, abs=1e-12)
    assert math.isnan(expected_calibration_error(confidence[:0], correct[:0]).item())


@pytest.mark.parametrize(
    ("confidence", "correct", "num_bins", "message"),
    [
        ([0.5, 0.5], [True], 15, "vectors of equal length"),
        ([1.5], [True], 15, "give probabilities"),
        ([float("nan")], [True], 15, "give probabilities"),
        ([0.5], [True], 0, "num_bins=0"),
    ],
)
def test_mistakes_are_named(confidence, correct, num_bins, message):
    with pytest.raises(ArgumentError, match=message):
        expected_calibration_error(torch.tensor(confidence), torch.tensor(correct), num_bins)


def test_bins_hold_what_the_error_is_made_of():
    confidence, correct = torch.tensor([0.1, 0.2, 0.25, 1.0]), torch.tensor([True, False, False, True])
    bins = calibration_bins(confidence, correct, num_bins=4)
    assert bins.num_samples.tolist() == [3, 0, 0, 1]
    assert bins.confidence[[0, 3]].tolist() == pytest.approx([0.55 / 3, 1.0], abs=1e-6)
    assert bins.accuracy[[0, 3]].tolist() == pytest.approx([1 / 3, 1.0])
    assert bins.accuracy[1:3].isnan().all()
