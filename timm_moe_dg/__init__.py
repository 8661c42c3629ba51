"""Sparse mixture-of-experts vision transformers for domain generalization: importing registers them with timm.

That waits for timm where it is not imported yet, and the names below wait for their first use: what needs no network,
such as the plan of a sweep, loads no torch.
"""

from typing import TYPE_CHECKING

from .lazy import exports
from .registration import register_with_timm

if TYPE_CHECKING:
    from . import models
    from .losses import auxiliary_loss, record_routing, router_outputs
    from .models.upcycling import upcycle

__version__ = "0.1.0"

__all__ = ["auxiliary_loss", "models", "record_routing", "router_outputs", "upcycle"]

__getattr__, __dir__ = exports(__name__, __file__)
register_with_timm()
