"""Losses: functions of tensors that return a scalar, and the losses that a model reports."""

from .models import (
    auxiliary_loss,
    check_loss_weights,
    force_tokens,
    record_routing,
    reported_losses,
    router_outputs,
    set_auxiliary_form,
)

__all__ = [
    "auxiliary_loss",
    "check_loss_weights",
    "force_tokens",
    "record_routing",
    "reported_losses",
    "router_outputs",
    "set_auxiliary_form",
]
