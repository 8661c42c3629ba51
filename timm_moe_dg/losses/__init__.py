"""Losses: tensors in, scalar out."""

from .router import auxiliary_loss, importance_loss, load_loss, record_routing, router_loss, router_outputs

__all__ = ["auxiliary_loss", "importance_loss", "load_loss", "record_routing", "router_loss", "router_outputs"]
