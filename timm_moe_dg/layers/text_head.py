"""A classifier whose weights are embeddings of texts, as in CLIP."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .parameters import upcast, without_autocast

CLIP_SCALE = 100.0  # at which CLIP's training stops raising the scale (Radford et al., 2021, section 2.5)


class TextHead(nn.Module):
    """Scores images by the cosines of their features and the classes' weights (Radford et al., 2021, arXiv:2103.00020).

    Args:
        num_classes: Number of classes (C).
        width: Length of a text's embedding (E).
        in_features: Length of the features (D), which a linear layer projects to E; None if they have E already.

    Attributes:
        weight: Class weights (C, E) of any length.
        logit_scale: Logarithm of the factor from cosines to logits, which is the inverse of CLIP's temperature.
    """

    def __init__(self, num_classes: int, width: int, in_features: int | None = None) -> None:
        super().__init__()
        self.projection = nn.Linear(in_features, width) if in_features else nn.Identity()
        self.weight = nn.Parameter(torch.randn(num_classes, width))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(CLIP_SCALE)))

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) features -> (B, C) logits, in float32 or better."""
        projected = self.projection(features)
        with without_autocast(features.device.type):  # bfloat16 has steps of 1/8 where CLIP's logits lie
            images = F.normalize(upcast(projected), dim=-1)
            texts = F.normalize(self.weight, dim=-1).to(images.dtype)
            return self.logit_scale.exp() * images @ texts.t()


def layer_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Names of a network's classifiers or first convolutions, in its pretrained configuration."""
    return (names,) if isinstance(names, str) else tuple(names or ())
