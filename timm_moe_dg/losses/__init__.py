"""Losses: functions of tensors that return a scalar."""

from .domain import (
    class_balanced_cross_entropy,
    classifier_gradient_variance,
    consistency_loss,
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
from .moge import cka_diversity_loss, discovered_domains, force_tokens, moge_losses, supcon_invariance_loss
from .router import auxiliary_loss, importance_loss, load_loss, record_routing, router_loss, router_outputs

__all__ = [
    "auxiliary_loss",
    "cka_diversity_loss",
    "class_balanced_cross_entropy",
    "classifier_gradient_variance",
    "consistency_loss",
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
    "router_loss",
    "router_outputs",
    "spectral_decoupling",
    "supcon_invariance_loss",
    "vrex_penalty",
]
