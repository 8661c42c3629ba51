"""Routers that learn nothing, as controls of those that do.

Axes: T tokens, D features, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor

from ...errors import RouterError
from ..router import Router, register_router


@register_router("random")
class RandomRouter(Router):
    """Logits by a linear map that keeps its random weights, a control. Arguments as in `Router`."""

    expert_rows = ("weight",)
    weight: Tensor

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, top_k, device=device, **options)
        # No parameter, so that nothing that makes parameters trainable reaches it
        self.register_buffer("weight", torch.empty(num_experts, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, standard deviation 0.02, as the linear router's."""
        trunc_normal_(self.weight, std=0.02)
        self.reset_state()

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return F.linear(x, self.weight.to(x.dtype))


@register_router("self")
class SelfRouter(Router):
    """Logits are the first E features of the token: no parameters (Self-Routing, arXiv:2604.00421, from its abstract).

    Which features is ours. Arguments as in `Router`.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, top_k, device=device, **options)
        if in_features < num_experts:
            raise RouterError.of("num_experts", num_experts, f"router='self' takes in_features={in_features} at most")

    def reset_parameters(self) -> None:
        """Has none."""
        self.reset_state()

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return x[:, : self.num_experts]
