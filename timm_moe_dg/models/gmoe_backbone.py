"""GMoE on any network of timm's with token-wise feed-forwards: CLIP, DINOv2 and v3, SigLIP, EVA, Swin, ConvNeXt."""

from typing import Any

from timm.models import register_model
from torch import nn

from ._backbone import Mixture, create_on_backbone, default_cfgs_of
from .upcycling import upcycle

__all__ = ["gmoe"]

default_cfgs = default_cfgs_of("gmoe")


@register_model
def gmoe(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GMoE on a network of timm's: `backbone='vit_base_patch16_clip_224.openai'`, and the options of `upcycle`.

    Further arguments are the backbone's own; with `features_only=True` it answers with the backbone's feature maps.
    """
    return create_on_backbone(Mixture("gmoe", upcycle), pretrained, **kwargs)
