"""Sparse mixture-of-experts vision transformers for domain generalization, as a plugin of timm.

Importing the package registers GMoE, SF-MoE, MoGE and ERM+LE with timm. With `pretrained=True` they start from timm's
published weights:

    >>> model = timm.create_model("gmoe_tiny_patch16", num_classes=7)
    >>> logits = model(torch.randn(2, 3, 224, 224))
    >>> loss = F.cross_entropy(logits, torch.tensor([0, 6])) + 0.01 * timm_moe_dg.auxiliary_loss(model)

The command `timm-moe-dg` lists the tools that train, evaluate and export models. `finetune`, `evaluate` and `predict`
are three of them as functions, and `predict_part` predicts a table.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from . import errors, layers, losses, models
from .layers import after_step
from .losses import auxiliary_loss, record_routing, router_outputs
from .models.upcycling import upcycle

if TYPE_CHECKING:
    from . import algorithms, data, metrics
    from .api import Run, compare, evaluate, finetune, predict, predict_part, read_runs

__all__ = [
    "Run",
    "after_step",
    "algorithms",
    "auxiliary_loss",
    "compare",
    "data",
    "errors",
    "evaluate",
    "finetune",
    "layers",
    "losses",
    "metrics",
    "models",
    "predict",
    "predict_part",
    "read_runs",
    "record_routing",
    "router_outputs",
    "upcycle",
]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        # When first needed, because what a model alone does not need takes time to import
        if name in ("algorithms", "data", "metrics"):
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            return getattr(import_module(f"{__name__}.api"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
