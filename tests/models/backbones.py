"""Networks of timm's, one small variant per form of feed-forward, and what they are given to see."""

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

_VIT: dict[str, Any] = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3}
_STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 24)}


@dataclass(frozen=True)
class Backbone:
    """One network.

    Attributes:
        name: timm's name of it.
        options: What makes it small.
        count: How many feed-forwards it has then.
        size: Side of its images in pixels.
    """

    name: str
    options: dict[str, Any] = field(hash=False)
    count: int
    size: int = 32

    def dense(self, **kwargs: Any) -> nn.Module:
        """The network as timm makes it."""
        return timm.create_model(self.name, **{"num_classes": 4, **self.options, **kwargs})

    def mixture(self, **kwargs: Any) -> nn.Module:
        """The network as `gmoe` makes it."""
        options = {"num_classes": 4, "moe_layers": "every_two", "num_experts": 3, **self.options, **kwargs}
        return timm.create_model("gmoe", backbone=self.name, **options)

    def images(self, batch: int = 2) -> Tensor:
        """Random images."""
        return torch.randn(batch, 3, self.size, self.size, generator=torch.Generator().manual_seed(0))


BACKBONES = {
    "Mlp": Backbone("vit_base_patch16_clip_quickgelu_224", {**_VIT, "patch_size": 16}, 3),
    "Mlp, inner norm": Backbone("beit3_base_patch16_224", {**_VIT, "patch_size": 16}, 3),
    "Mlp, channels last": Backbone("convnext_tiny", _STAGES, 5, 64),
    "Mlp, 1x1 convolutions": Backbone("convnext_zepto_rms", _STAGES, 5, 64),
    "Mlp of windows": Backbone(
        "swin_tiny_patch4_window7_224",
        {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
        4,
        64,
    ),
    "Mlp of channels": Backbone("mixer_s32_224", {"img_size": 64}, 8, 64),
    "GluMlp": Backbone("vit_giant_patch14_dinov2", {**_VIT, "patch_size": 16}, 3),
    "SwiGLU": Backbone("eva02_tiny_patch14_224", {**_VIT, "patch_size": 16}, 3),
    "SwiGLU, inner norm": Backbone("eva02_base_patch14_224", {**_VIT, "patch_size": 16}, 3),
    "DINOv3": Backbone("vit_small_patch16_dinov3", {**_VIT, "patch_size": 16}, 3),
    "StarReLU": Backbone("caformer_s18", {}, 18, 64),
    "NormMlp": Backbone("tiny_vit_5m_224", {}, 10, 64),
    "GeGluMlp": Backbone("vitamin_small_224", {"img_size": 64, "depth": 2}, 2, 64),
    "ConvMlp": Backbone("inception_next_atto", {"depths": (1, 1, 1, 1), "dims": (16, 24, 32, 48)}, 4, 64),
}
