"""Protocols: options, records, evaluation, selection rules and plans of runs."""

from .domain_roles import role_scores
from .evaluation import Predictions, domain_accuracies, out_losses, predict
from .records import Record, read_records
from .search_space import SEARCH_SPACES, draw_hparams, resolve_hparams
from .selection import (
    OOD_RULES,
    SELECTION_RULES,
    leave_one_domain_out_cv,
    ood_f1_macro,
    ood_worst_group,
    oracle,
    reported_accuracy,
    training_domain_validation,
    transfer_accuracy,
    validation_accuracy,
    whole_accuracy,
)

__all__ = [
    "OOD_RULES",
    "SEARCH_SPACES",
    "SELECTION_RULES",
    "Predictions",
    "Record",
    "domain_accuracies",
    "draw_hparams",
    "leave_one_domain_out_cv",
    "ood_f1_macro",
    "ood_worst_group",
    "oracle",
    "out_losses",
    "predict",
    "read_records",
    "reported_accuracy",
    "resolve_hparams",
    "role_scores",
    "training_domain_validation",
    "transfer_accuracy",
    "validation_accuracy",
    "whole_accuracy",
]
