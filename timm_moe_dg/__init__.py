"""Sparse mixture-of-experts vision transformers for domain generalization: importing registers them with timm."""

from . import models
from .losses import auxiliary_loss, record_routing, router_outputs
from .models.upcycling import upcycle

__version__ = "0.1.0"

__all__ = ["auxiliary_loss", "models", "record_routing", "router_outputs", "upcycle"]
