"""Losses: functions of tensors that return a scalar, and the losses that a model reports."""

from ..layers.reports.routing import importance_loss, load_loss, tutel_loss, vmoe_loss
from ..layers.reports.specialization import cka_diversity_loss, discovered_domains, supcon_invariance_loss
from .domain import (
    class_balanced_cross_entropy,
    classifier_gradient_variance,
    coral_distance,
    feature_divergence,
    fishr_penalty,
    group_weights,
    input_gradient_penalty,
    irm_penalty,
    mmd_distance,
    rdm_penalties,
    spectral_decoupling,
    vrex_penalty,
)
from .models import (
    auxiliary_loss,
    force_tokens,
    moge_losses,
    record_routing,
    reported_losses,
    router_outputs,
    set_auxiliary_form,
)

__all__ = [
    "auxiliary_loss",
    "cka_diversity_loss",
    "class_balanced_cross_entropy",
    "classifier_gradient_variance",
    "coral_distance",
    "discovered_domains",
    "feature_divergence",
    "fishr_penalty",
    "force_tokens",
    "group_weights",
    "importance_loss",
    "input_gradient_penalty",
    "irm_penalty",
    "load_loss",
    "mmd_distance",
    "moge_losses",
    "rdm_penalties",
    "record_routing",
    "reported_losses",
    "router_outputs",
    "set_auxiliary_form",
    "spectral_decoupling",
    "supcon_invariance_loss",
    "tutel_loss",
    "vmoe_loss",
    "vrex_penalty",
]
