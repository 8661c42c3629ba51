"""Hybrid SF-MoE: a ResNet-26 stem in front of SF-MoE's alternating blocks.

Sparse Fusion Mixture-of-Experts are Domain Generalizable Learners (Li et al., 2022), section 2.4.

"R26-S/16" is the paper's label; its code loads AugReg's `vit_small_r26_s32_224`, whose stem has stride 32 (7 x 7 tokens
at 224 px). So does the registered name; `output_stride=16` gives a 14 x 14 grid from the same weights, with the
position embedding resampled. The released code has mixtures in blocks 5 and 11: `moe_layers=(5, 11)`.
"""

from functools import partial
from typing import Any

import torch
from timm.layers import HybridEmbed, StdConv2dSame
from timm.models import generate_default_cfgs, register_model
from timm.models.resnetv2 import ResNetV2

from ._build import IMAGENET_CFG, create_moe_vit
from ._moe_vit import MoeVisionTransformer

default_cfgs = generate_default_cfgs(
    {
        "hybrid_sfmoe_r26_s16.augreg_in21k_ft_in1k": {
            **IMAGENET_CFG,
            "hf_hub_id": "timm/vit_small_r26_s32_224.augreg_in21k_ft_in1k",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.backbone.stem.conv",
            "paper_ids": "arXiv:2206.04046",
        }
    }
)


class HybridMoeVisionTransformer(MoeVisionTransformer):
    """`MoeVisionTransformer` on the feature map of a pre-activation-free ResNetV2-26.

    `patch_size` counts pixels of the feature map, each of which is `output_stride` pixels of the image: 32 or 16 (8
    also works).
    """

    def __init__(
        self,
        in_chans: int = 3,
        patch_size: int = 1,
        output_stride: int = 32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        backbone = ResNetV2(
            layers=[2, 2, 2, 2],
            num_classes=0,
            global_pool="",
            in_chans=in_chans,
            output_stride=output_stride,
            preact=False,
            stem_type="same",
            conv_layer=partial(StdConv2dSame, eps=1e-8),
            **dd,
        )
        embed_layer = partial(HybridEmbed, backbone=backbone)
        super().__init__(in_chans=in_chans, patch_size=patch_size, embed_layer=embed_layer, **kwargs, **dd)


@register_model
def hybrid_sfmoe_r26_s16(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """R26 stem of stride 32 (or `output_stride=16`), then SF-MoE. Options are those of `MoeVisionTransformer`."""
    mixture = {"moe_layers": "every_two", "num_experts": 6, "top_k": 2, "router": "linear", "expert_drop": 0.1}
    model_args = {**mixture, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return create_moe_vit(HybridMoeVisionTransformer, "hybrid_sfmoe_r26_s16", pretrained, **model_args)
