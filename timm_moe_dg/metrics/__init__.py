"""Metrics: pure functions of (prediction, target, group)."""

from .accuracy import GroupAccuracy, accuracy, group_accuracy, worst_group_accuracy
from .calibration import expected_calibration_error
from .clustering import normalized_mutual_information, normalized_mutual_information_of_counts
from .confusion import confusion_matrix
from .f1 import f1_macro
from .groups import WorstGroup, worst_group

__all__ = [
    "GroupAccuracy",
    "WorstGroup",
    "accuracy",
    "confusion_matrix",
    "expected_calibration_error",
    "f1_macro",
    "group_accuracy",
    "normalized_mutual_information",
    "normalized_mutual_information_of_counts",
    "worst_group",
    "worst_group_accuracy",
]
