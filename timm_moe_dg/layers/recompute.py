"""The second half of a feed-forward, computed again in the backward pass instead of kept.

The hidden features after the activation are as large as those before it and cheap to get from them. Axes: T items,
H hidden features, D features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _GeluLinear(torch.autograd.Function):
    """Keeps the features before the activation and the dropout mask; both derivatives are differentiable again."""

    @staticmethod
    def forward(
        before: Tensor, keep: Tensor | None, weight: Tensor, bias: Tensor | None, scale: float, approximate: str
    ) -> Tensor:
        hidden = _hidden(before, keep, approximate)
        if bias is None:
            return hidden @ weight.t() * scale
        return torch.addmm(bias, hidden, weight.t(), alpha=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        before, keep, weight, bias, ctx.scale, ctx.approximate = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(before, keep, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        before, keep, weight = ctx.saved_tensors
        scaled = grad if ctx.scale == 1 else grad * ctx.scale
        grad_hidden = scaled @ weight if keep is None else scaled @ weight * keep
        grad_before = torch.ops.aten.gelu_backward(grad_hidden, before, approximate=ctx.approximate)
        grad_weight = scaled.t() @ _hidden(before, keep, ctx.approximate)
        return grad_before, None, grad_weight, grad.sum(0) if ctx.has_bias else None, None, None


def _hidden(before: Tensor, keep: Tensor | None, approximate: str) -> Tensor:
    hidden = F.gelu(before, approximate=approximate)
    return hidden if keep is None else hidden * keep


def gelu_linear(before: Tensor, act: nn.GELU, weight: Tensor, bias: Tensor | None, drop: float = 0.0) -> Tensor:
    """dropout(GELU(before)) @ weight.T + bias, without keeping what lies between.

    Args:
        before: (T, H) features before the activation.
        act: Says which form of GELU.
        weight: (D, H).
        bias: (D,), or None.
        drop: Dropout rate; 0 outside of training.

    Returns:
        (T, D), in the type of `before`.
    """
    weight = weight.to(before.dtype)  # autocast would do it, but is off in the backward pass
    bias = None if bias is None else bias.to(before.dtype)
    keep = torch.empty_like(before, dtype=torch.bool).bernoulli_(1 - drop) if drop > 0 else None
    scale = 1 / (1 - drop) if drop < 1 else 0.0
    return _GeluLinear.apply(before, keep, weight, bias, scale, act.approximate)
