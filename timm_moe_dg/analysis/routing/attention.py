"""The class token's attention in the last block, and the similarity of its heads (Li et al., SF-MoE, 2022, figure 3).

Axes: B images, M heads, N tokens, H x W patches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from ...networks.build import Network
from ..run_view import evaluation_mode


def class_attention(model: Network, images: Tensor, metadata: Tensor | None = None) -> Tensor:
    """The last block's attention from the class token to the patches, for images (B, 3, height, width).

    The result is (B, M, H, W) on CPU. Each head's weights sum to 1 minus the weights of the prefix tokens.
    """
    # The input of the layer's dropout is the softmax of the scores, which the fused kernel does not compute
    attention, weights = _last_attention(model), list[Tensor]()
    fused = attention.fused_attn
    handle = attention.attn_drop.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0].detach()))
    try:
        attention.fused_attn = False
        with evaluation_mode(model):
            model(images) if metadata is None else model(images, metadata)
    finally:
        attention.fused_attn = fused
        handle.remove()
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    return weights[-1][:, :, 0, model.num_prefix_tokens :].unflatten(-1, grid).float().cpu()


def _last_attention(model: Network) -> Any:
    name = type(model).__name__
    if getattr(model, "cls_token", None) is None:
        raise ArgumentError.of("model", name, "has no class token; give a vision transformer with one")
    attention = getattr(model.blocks[-1], "attn", None)
    if not hasattr(attention, "fused_attn") or not hasattr(attention, "attn_drop"):
        remedy = "has no attention of timm's kind in its last block; give a timm vision transformer"
        raise ArgumentError.of("model", name, remedy)
    return attention


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine similarity between the maps of two different heads: (B, M, H, W) -> (B,); NaN for a single head."""
    rows = F.normalize(maps.flatten(2).double(), dim=-1)
    cosines = rows @ rows.transpose(1, 2)
    heads = maps.shape[1]
    off_diagonal = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)
    return off_diagonal / (heads * (heads - 1)) if heads > 1 else torch.full_like(off_diagonal, float("nan"))


def mass_mask(maps: Tensor, share: float) -> Tensor:
    """Selects the fewest cells of each map (B, M, H, W) that hold a share of its sum: bool, the same shape."""
    if not 0 < share <= 1:
        raise ArgumentError.of("mass", share, "give a share above 0, at most 1, such as 0.6")
    values, order = maps.flatten(2).double().sort(dim=-1, descending=True)
    mass_before = values.cumsum(-1) - values
    # The tolerance absorbs rounding: cells that hold exactly the share are enough
    selected = mass_before < (share - 1e-6) * values.sum(-1, keepdim=True)
    return torch.zeros_like(selected).scatter(-1, order, selected).view(maps.shape)
