"""Losses: tensors in, scalar out."""

from .moge import discovered_domains, force_tokens, moge_losses
from .router import auxiliary_loss, importance_loss, load_loss, record_routing, router_loss, router_outputs
from .specialization import cka_diversity_loss, supcon_invariance_loss

__all__ = [
    "auxiliary_loss",
    "cka_diversity_loss",
    "discovered_domains",
    "force_tokens",
    "importance_loss",
    "load_loss",
    "moge_losses",
    "record_routing",
    "router_loss",
    "router_outputs",
    "supcon_invariance_loss",
]
