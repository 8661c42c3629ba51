"""Sparse mixture-of-experts vision transformers for domain generalization, as a plugin of timm.

Importing the package registers GMoE, SF-MoE, MoGE and ERM+LE with timm. With `pretrained=True` they start from timm's
published weights:

    >>> model = timm.create_model("gmoe_tiny_patch16", num_classes=7)
    >>> logits = model(torch.randn(2, 3, 224, 224))
    >>> loss = F.cross_entropy(logits, torch.tensor([0, 6])) + 0.01 * timm_moe_dg.auxiliary_loss(model)

The command `timm-moe-dg` lists the tools that train, evaluate and export models.
"""

__version__ = "0.1.0"

from . import algorithms, data, errors, layers, losses, metrics, models
from .layers import after_step
from .losses import auxiliary_loss, record_routing, router_outputs
from .models.upcycling import upcycle

__all__ = [
    "after_step",
    "algorithms",
    "auxiliary_loss",
    "data",
    "errors",
    "layers",
    "losses",
    "metrics",
    "models",
    "record_routing",
    "router_outputs",
    "upcycle",
]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
