"""MoGE on any of timm's plain vision transformers: CLIP, DINOv2, SigLIP, DeiT, AugReg."""

from typing import Any

from timm.models import register_model
from torch import nn

from ._backbone import Mixture, create_on_backbone, default_cfgs_of
from .geo_upcycling import upcycle_with_metadata

__all__ = ["moge"]

default_cfgs = default_cfgs_of("moge")


@register_model
def moge(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoGE on a vision transformer of timm's: `backbone='vit_base_patch16_clip_224.openai'`, and the mixture's options.

    These are those of `GeoMoeVisionTransformer`; further arguments are the backbone's own.
    """
    return create_on_backbone(Mixture("moge", upcycle_with_metadata), pretrained, **kwargs)
