"""Where the class token looks: its attention in the last block, head by head, and how much the heads repeat each other.

Sparse Fusion Mixture-of-Experts are Domain Generalizable Learners (Li et al., 2022), figure 3. Axes: B images, M heads,
N tokens, H x W patches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from ...networks.build import Network


@contextmanager
def plain_attention(attention: Any) -> Iterator[list[Tensor]]:
    """Lets an attention layer of timm compute its weights in the open, and collects them, (B, M, N, N) each.

    The fused kernel, which never forms the weights, is off meanwhile and restored afterwards.
    """
    weights: list[Tensor] = []
    fused = attention.fused_attn
    handle = attention.attn_drop.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0].detach()))
    try:
        attention.fused_attn = False
        yield weights
    finally:
        attention.fused_attn = fused
        handle.remove()


@torch.no_grad()
def class_attention(model: Network, images: Tensor, metadata: Tensor | None = None) -> Tensor:
    """The last block's attention from the class token to the patches.

    Args:
        model: A timm vision transformer, dense or a mixture, not wrapped; it is left in its mode.
        images: (B, 3, height, width), normalized.
        metadata: (B, ...) for models that take it.

    Returns:
        (B, M, H, W) on CPU; a head's weights add up to 1 less what it gives to the class token and other prefix tokens.

    Raises:
        ArgumentError: The model has no class token, or no attention that can be read.
    """
    attention = _last_attention(model)
    training = model.training
    model.eval()
    try:
        with plain_attention(attention) as weights:
            model(images) if metadata is None else model(images, metadata)
    finally:
        model.train(training)
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    return weights[-1][:, :, 0, model.num_prefix_tokens :].unflatten(-1, grid).float().cpu()


def _last_attention(model: Network) -> Any:
    name = type(model).__name__
    if getattr(model, "cls_token", None) is None:
        raise ArgumentError.of("model", name, "has no class token, whose attention could be drawn; give a ViT with one")
    attention = getattr(model.blocks[-1], "attn", None)
    if not hasattr(attention, "fused_attn") or not hasattr(attention, "attn_drop"):
        raise ArgumentError.of("model", name, "has no attention of timm's kind in its last block")
    return attention


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine between the maps of two different heads: 1 where all heads look alike.

    Args:
        maps: (B, M, H, W), not negative.

    Returns:
        (B,); NaN with a single head.
    """
    rows = F.normalize(maps.flatten(2).double(), dim=-1)
    cosines = rows @ rows.transpose(1, 2)
    heads = maps.shape[1]
    off_diagonal = cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)
    return off_diagonal / (heads * (heads - 1)) if heads > 1 else torch.full_like(off_diagonal, float("nan"))


def mass_mask(maps: Tensor, share: float) -> Tensor:
    """The fewest cells of each map that hold a share of its mass.

    Args:
        maps: (B, M, H, W), not negative.
        share: Above 0, at most 1.

    Returns:
        bool (B, M, H, W).

    Raises:
        ArgumentError: The share is out of range.
    """
    if not 0 < share <= 1:
        raise ArgumentError.of("mass", share, "give a share above 0, at most 1, such as 0.6")
    values, order = maps.flatten(2).double().sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    kept = before < (share - 1e-6) * values.sum(-1, keepdim=True)  # sums of shares are rounded
    return torch.zeros_like(kept).scatter(-1, order, kept).view(maps.shape)
