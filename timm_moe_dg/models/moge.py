"""MoGE: vision transformers with a shared expert and experts routed by metadata, such as where an image was taken.

Mixture of Geographical Experts: Disentangling Earth (Rangzan et al.).
"""

from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from ._backbone import Mixture, create_on_backbone
from ._build import IMAGENET_CFG, create_moe_vit, deit_cfg
from ._geo_vit import GeoMoeVisionTransformer
from .upcycling import upcycle_with_metadata

default_cfgs = generate_default_cfgs(
    {
        "moge.deit_in1k": deit_cfg("small"),  # of the default backbone. Every other one has its own.
        "moge_tiny.deit_in1k": deit_cfg("tiny"),
        "moge_small_patch32_384.augreg_in21k_ft_in1k": {
            **IMAGENET_CFG,
            "hf_hub_id": "timm/vit_small_patch32_384.augreg_in21k_ft_in1k",
            "input_size": (3, 384, 384),
            "crop_pct": 1.0,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
        },
    }
)


def _create_moge(variant: str, pretrained: bool, **kwargs: Any) -> GeoMoeVisionTransformer:
    mixture = {"moe_layers": "last_two", "num_experts": 6, "top_k": 3, "expert_drop": 0.0, "metadata_drop": 0.5}
    return create_moe_vit(GeoMoeVisionTransformer, variant, pretrained, **{**mixture, **kwargs})


@register_model
def moge_tiny(pretrained: bool = False, **kwargs: Any) -> GeoMoeVisionTransformer:
    """MoGE on DeiT-Ti/16 with coordinates, the paper's FMoW model. Options are those of `GeoMoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return _create_moge("moge_tiny", pretrained, **{"metadata_encoder": "spherical_harmonics", **model_args})


@register_model
def moge_small_patch32_384(pretrained: bool = False, **kwargs: Any) -> GeoMoeVisionTransformer:
    """MoGE-S/32 for iWildCam's 323 location ids; the paper has 448 px. Options: those of `GeoMoeVisionTransformer`."""
    model_args = {"patch_size": 32, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    ids = {"metadata_encoder": "location_id", "num_locations": 323}
    return _create_moge("moge_small_patch32_384", pretrained, **{**ids, **model_args})


@register_model
def moge(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoGE on any of timm's plain vision transformers: CLIP, DINOv2, SigLIP, DeiT, AugReg.

    Options are `backbone='vit_base_patch16_clip_224.openai'`, those of `timm_moe_dg.models.upcycle_with_metadata`, and
    the backbone's own.
    """
    mixture = Mixture("moge", upcycle_with_metadata, GeoMoeVisionTransformer.option_classes)
    return create_on_backbone(mixture, pretrained, **kwargs)
