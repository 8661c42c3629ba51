"""Metrics: pure functions of predictions, targets and groups."""

from .accuracy import (
    GroupAccuracy,
    WorstGroup,
    accuracy,
    confusion_matrix,
    f1_macro,
    group_accuracy,
    wilson_interval,
    worst_group,
)
from .calibration import CalibrationBins, calibration_bins, expected_calibration_error

__all__ = [
    "CalibrationBins",
    "GroupAccuracy",
    "WorstGroup",
    "accuracy",
    "calibration_bins",
    "confusion_matrix",
    "expected_calibration_error",
    "f1_macro",
    "group_accuracy",
    "wilson_interval",
    "worst_group",
]
