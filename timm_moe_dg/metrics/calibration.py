"""Calibration: whether a model that says 80% is right in 80 of 100 cases."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ._shapes import check_vectors


class CalibrationBins(NamedTuple):
    """Predictions by their confidence, in M bins of equal width.

    Attributes:
        num_samples: (M,) int64.
        confidence: (M,) float64 mean confidence; NaN in an empty bin.
        accuracy: (M,) float64 share of right predictions; NaN in an empty bin.
    """

    num_samples: Tensor
    confidence: Tensor
    accuracy: Tensor


def calibration_bins(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> CalibrationBins:
    """Bins predictions: bin m = 1..M holds confidences in ((m - 1) / M, m / M], and the first one that of 0.

    Args:
        confidence: Probability of the predicted class, 0 to 1, shape (N,).
        correct: Whether the prediction is right, shape (N,).
        num_bins: M.

    Raises:
        ArgumentError: The shapes differ, a confidence is no probability, or there is no bin.
    """
    check_vectors(confidence=confidence, correct=correct)
    if num_bins < 1:
        raise ArgumentError.of("num_bins", num_bins, "give at least one bin")
    confidence = confidence.double()
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ArgumentError.of("confidence", (confidence.min().item(), confidence.max().item()), "give probabilities")
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    bins = torch.bucketize(confidence, edges)
    num_samples = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct.double())]
    return CalibrationBins(num_samples, sums[0] / num_samples, sums[1] / num_samples)


def expected_calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Tensor:
    """Mean gap between confidence and accuracy over equal-width bins, weighted by their samples.

    ECE = sum_m |B_m| / N * |acc(B_m) - conf(B_m)| with bin m = 1..M holding confidences in ((m - 1) / M, m / M]
    (Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3; a confidence of 0 is in the first).

    >>> expected_calibration_error(torch.tensor([0.9, 0.9, 0.6]), torch.tensor([True, False, True])).item()
    0.399...

    Args:
        confidence: Probability of the predicted class, 0 to 1, shape (N,).
        correct: Whether the prediction is right, shape (N,).
        num_bins: M.

    Returns:
        A float64 scalar in 0..1; NaN without samples.

    Raises:
        ArgumentError: The shapes differ, a confidence is no probability, or there is no bin.
    """
    bins = calibration_bins(confidence, correct, num_bins)
    gaps = (bins.accuracy - bins.confidence).abs().nan_to_num()  # an empty bin weighs nothing
    return (gaps * bins.num_samples).sum() / bins.num_samples.sum()
