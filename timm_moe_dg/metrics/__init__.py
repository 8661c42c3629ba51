"""Metrics: pure functions of (prediction, target, group)."""

from .accuracy import GroupAccuracy, WorstGroup, accuracy, group_accuracy, worst_group
from .calibration import CalibrationBins, calibration_bins, expected_calibration_error
from .clustering import normalized_mutual_information, normalized_mutual_information_of_counts
from .confusion import confusion_matrix, f1_macro

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
    "normalized_mutual_information",
    "normalized_mutual_information_of_counts",
    "worst_group",
]
