"""GMoE and MoGE whose routers stay at their random weights: `--import frozen_routers --model gmoe_tiny_frozen`."""

from typing import Any

from timm.models import generate_default_cfgs, get_pretrained_cfg, register_model
from torch import nn

from timm_moe_dg.layers import Router
from timm_moe_dg.models.gmoe import gmoe_tiny_patch16
from timm_moe_dg.models.moge import moge_tiny

__all__ = ["gmoe_tiny_frozen", "moge_tiny_frozen"]
_SOURCES = {"gmoe_tiny_frozen": "gmoe_tiny_patch16", "moge_tiny_frozen": "moge_tiny"}
default_cfgs = generate_default_cfgs(
    {name: cfg.to_dict() for name, source in _SOURCES.items() if (cfg := get_pretrained_cfg(source))}
)


def _frozen(model: nn.Module) -> nn.Module:
    """Freezes the routers, and MoGE's metadata encoder, which is part of them."""
    encoders = [model.metadata_encoder] if hasattr(model, "metadata_encoder") else []
    for module in [*encoders, *(module for module in model.modules() if isinstance(module, Router))]:
        module.requires_grad_(False)
    return model


@register_model
def gmoe_tiny_frozen(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`gmoe_tiny_patch16` with frozen routers."""
    return _frozen(gmoe_tiny_patch16(pretrained, **kwargs))


@register_model
def moge_tiny_frozen(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`moge_tiny` with a frozen router."""
    return _frozen(moge_tiny(pretrained, **kwargs))
