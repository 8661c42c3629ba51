"""Calibration of predicted probabilities: reliability bins and expected calibration error.

Axes: N samples, M bins.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from .accuracy import check_vectors


class CalibrationBins(NamedTuple):
    """Statistics of predictions in M bins of equal width, by confidence. The means of an empty bin are NaN."""

    num_samples: Tensor  # (M,) int64
    confidence: Tensor  # (M,) float64, mean
    accuracy: Tensor  # (M,) float64


def calibration_bins(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> CalibrationBins:
    """Bins predictions by confidence: bin m = 1..M covers ((m - 1) / M, m / M]; a confidence of 0 is in the first bin.

    `confidence` (N,) is the probability of the predicted class, 0..1, and `correct` (N,) whether that class is right.
    """
    check_vectors(confidence=confidence, correct=correct)
    if num_bins < 1:
        raise ArgumentError.of("num_bins", num_bins, "give at least one bin")
    confidence = confidence.double()
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ArgumentError.of(
            "confidence", (confidence.min().item(), confidence.max().item()), "give probabilities, 0 to 1"
        )
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    bins = torch.bucketize(confidence, edges)
    num_samples = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct.double())]
    return CalibrationBins(num_samples, sums[0] / num_samples, sums[1] / num_samples)


def expected_calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Tensor:
    """Mean gap between confidence and accuracy over bins of equal width, weighted by their number of samples.

    ECE = `sum_m |B_m| / N * |acc(B_m) - conf(B_m)|`, a float64 scalar in 0..1, or NaN without samples (Guo et al., "On
    Calibration of Modern Neural Networks", ICML 2017, equation 3). The arguments are those of `calibration_bins`.

    >>> expected_calibration_error(torch.tensor([0.9, 0.9, 0.6]), torch.tensor([True, False, True])).item()
    0.399...
    """
    bins = calibration_bins(confidence, correct, num_bins)
    gaps = (bins.accuracy - bins.confidence).abs().nan_to_num()  # NaN in empty bins, whose weight is 0
    return (gaps * bins.num_samples).sum() / bins.num_samples.sum()
