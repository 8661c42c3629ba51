"""Sparse mixture-of-experts vision transformers for domain generalization. Importing registers them with timm."""

__version__ = "0.1.0"

from . import algorithms, layers, losses, metrics, models
from .losses import auxiliary_loss, record_routing, router_outputs
from .models.upcycling import upcycle

__all__ = [
    "algorithms",
    "auxiliary_loss",
    "layers",
    "losses",
    "metrics",
    "models",
    "record_routing",
    "router_outputs",
    "upcycle",
]
