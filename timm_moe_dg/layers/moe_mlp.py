"""Sparse mixture-of-experts feed-forward layer, a replacement for timm's Mlp.

Axes: B images, N tokens per image, T = B * N tokens, D features, E experts, K experts per token.
"""

import copy
from typing import Any, Final, Self, cast

import torch
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..errors import RouterError
from .assignments import expert_capacity, over_capacity
from .experts import StackedExperts, StackedLinear
from .feed_forwards import GatedActivation, read_feed_forward
from .mixture_options import MixtureOptions, build_options
from .reports.losses import LossWeights, ReportedLoss
from .reports.routing import RouterOutput
from .router import Router, build_router


class RoutedMlp(nn.Module):
    """Base of the mixture layers: stacked experts, a router, and a record of the last routing.

    Each forward in training overwrites `routing`. In evaluation it does so while `record_routing` is set.
    """

    __jit_unused_properties__ = ["fc1", "fc2"]  # noqa: RUF012 (TorchScript reads the list from the class)

    def __init__(self, experts: StackedExperts) -> None:
        super().__init__()
        self.experts = experts
        self.record_routing = False
        # Overwritten and never added to: gradient checkpointing runs a forward twice and must leave one record
        self.routing: RouterOutput | None = None

    @property
    def fc1(self) -> StackedLinear:
        """First layer of all experts, under the name that timm's Mlp uses."""
        return self.experts.fc1

    @property
    def fc2(self) -> StackedLinear:
        """Second layer of all experts, under the name that timm's Mlp uses."""
        return self.experts.fc2

    @torch.jit.unused
    def record(self, routing: RouterOutput) -> None:
        """Keeps the routing of a forward, in training or on demand."""
        if self.training or self.record_routing:
            self.routing = routing
            cast(Router, self.router).count(routing)

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the router's loss, see `layers.reports.losses`."""
        if self.routing is None:
            return {}
        return {"aux_loss": ReportedLoss(cast(Router, self.router).loss(self.routing), weights.aux_coef)}

    def __getstate__(self) -> dict[str, object]:
        # A recorded routing belongs to a graph, so it can be neither copied (weight averaging) nor pickled
        return dict(self.__dict__, routing=None)


@torch.no_grad()
def after_step(model: nn.Module) -> None:
    """Calls `Router.after_step` of every router; call this once after each optimizer step of a training loop.

    The routers' `expert_counts` are added over the processes of torch.distributed before, and start at 0 afterwards.
    Models without a router that has an `after_step` are left as they are. The model may be wrapped for distributed
    training.

    >>> model = timm.create_model("gmoe_tiny_patch16")
    >>> timm_moe_dg.after_step(model)
    """
    routers = [
        module
        for module in model.modules()
        if isinstance(module, Router) and type(module).after_step is not Router.after_step
    ]
    if routers and torch.distributed.is_available() and torch.distributed.is_initialized():
        device = next(model.parameters()).device
        counts = torch.cat([router.expert_counts.to(device) for router in routers])
        torch.distributed.all_reduce(counts)
        for router, total in zip(routers, counts.split([router.num_experts for router in routers]), strict=True):
            router.expert_counts = total
    for router in routers:
        router.after_step()
        router.expert_counts = torch.zeros_like(router.expert_counts)


@register_notrace_module
class MoeMlp(RoutedMlp):
    """Sparse mixture of feed-forward experts with token-level routing (GMoE, section 4.2; SF-MoE, section 2.2).

    The path of a token x_D: (1) the router scores the E experts and picks K; (2) each of them computes
    W2 act(W1 x + b1) + b2; (3) the outputs are added, weighted by the combine weights. By default no token is dropped.
    A `capacity_factor` drops tokens in training alone, so a prediction never depends on its batch neighbors.

    Padding is not routed, and its output is 0. A network that pads sets `valid` before each forward, (B, N) bool, False
    for padding. `upcycle` does so for timm's NaFlex networks.

    Takes timm's `Mlp` arguments, so that it can be a block's `mlp_layer`.

    Args:
        in_features: D.
        hidden_features: Hidden width of each expert; None means `in_features`.
        out_features: As timm's Mlp has it; must equal `in_features` here.
        norm_layer: Normalization of the hidden features, shared by the experts; None for none.
        bias: Whether the experts' layers have biases; a pair sets them apart.
        drop: timm's projection dropout: after the activation and after the layer, in training.
        expert_drop: As in `MixtureOptions`; acts besides `drop`.
        gated: Whether the experts multiply by a gate, see `StackedExperts`.
        channels_first: Whether the layer takes and returns (B, D, height, width) instead of (..., D).
        **mixture: The other options of `MixtureOptions`: `num_experts`, `top_k`, `router`, ...
    """

    channels_first: Final[bool]

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] | None = None,
        bias: bool | tuple[bool, bool] = True,
        drop: float = 0.0,
        *,
        expert_drop: float = 0.0,
        gated: bool = False,
        channels_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **mixture: Any,
    ) -> None:
        if out_features not in (None, in_features):
            raise RouterError.of("out_features", out_features, f"experts return in_features={in_features} features")
        options = build_options(MixtureOptions, {"expert_drop": expert_drop, **mixture}, type(self).__name__)
        experts = StackedExperts(
            options.num_experts,
            in_features,
            hidden_features or in_features,
            act_layer=act_layer,
            norm_layer=norm_layer,
            bias=bias,
            hidden_drop=combined_rate(drop, expert_drop),
            gated=gated,
            device=device,
            dtype=dtype,
        )
        super().__init__(experts)
        self.channels_first = channels_first
        self.norm: nn.Module = nn.Identity()  # a dense feed-forward may bring a normalization of its input
        self.valid: Tensor | None = None
        self.capacity_factor = options.capacity_factor
        self.router = build_router(
            options.router,
            options.router_kwargs or {},
            in_features=in_features,
            num_experts=options.num_experts,
            top_k=options.top_k,
            normalize_weights=options.top_k > 1 if options.normalize_weights is None else options.normalize_weights,
            noise_std=options.router_noise,
            device=device,
            dtype=dtype,
        )
        self.drop = nn.Dropout(drop)

    @classmethod
    def from_dense(cls, mlp: nn.Module, expert_drop: float = 0.0, **mixture: Any) -> Self:
        """Upcycles a dense feed-forward, see `read_feed_forward`: every expert starts as a copy, the router at random.

        The experts share one copy of the activation and the normalizations. A normalization of the input acts before
        the router too. Dropout rates, frozen parameters and the mode are kept, and `expert_drop` acts besides. The
        options are those of `MixtureOptions`. The evaluation output equals the dense one where the combine weights
        sum to 1.
        """
        dense = read_feed_forward(mlp)
        first, second = dense.weights()
        moe = cls(
            second.shape[0],
            second.shape[1],
            act_layer=nn.Identity,
            bias=(dense.first[0].bias is not None, dense.second.bias is not None),
            gated=isinstance(dense.act, GatedActivation),
            channels_first=dense.channels_first,
            device=first.device,
            dtype=first.dtype,
            **mixture,
        )
        moe.experts.load_dense(dense)
        moe.norm = copy.deepcopy(dense.pre_norm)
        moe.experts.drop.p = combined_rate(dense.hidden_drop, expert_drop)
        moe.drop.p = dense.drop
        return moe.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) tokens -> (..., D); (B, D, height, width) both if channels come first."""
        if self.channels_first:
            return self._mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:  # noqa: RET505 (TorchScript compiles only the branch that `channels_first` chooses)
            return self._mix(x)

    def _mix(self, x: Tensor) -> Tensor:
        tokens_TD = self.norm(x.reshape(-1, x.shape[-1]))
        routing = self.router(tokens_TD)
        if not torch.jit.is_scripting():
            routing = self._without_padding(routing)
        expert_indices, routed = routing.expert_indices, routing.routed
        # Index E is no expert: its assignments are skipped
        if routed is not None:
            expert_indices = expert_indices.masked_fill(~routed.unsqueeze(1), self.experts.num_experts)
        routing = self._limit(routing, expert_indices)
        dropped = routing.dropped
        if dropped is not None:
            expert_indices = expert_indices.masked_fill(dropped, self.experts.num_experts)
        outputs_TD = self.experts(tokens_TD, expert_indices, routing.combine_weights)
        if not torch.jit.is_scripting():
            self.record(routing)
        return self.drop(outputs_TD.view(x.shape))

    @torch.jit.unused
    def _without_padding(self, routing: RouterOutput) -> RouterOutput:
        """Marks padding as not routed. A mask is for one forward."""
        valid, self.valid = self.valid, None
        return routing if valid is None else routing._replace(routed=valid.flatten())

    def _limit(self, routing: RouterOutput, expert_indices: Tensor) -> RouterOutput:
        """Drops the assignments over capacity, in training with a capacity factor."""
        capacity_factor = self.capacity_factor
        if capacity_factor is None or not self.training:
            return routing
        num_tokens, num_experts = routing.logits.shape
        routed = routing.routed
        if routed is not None:
            num_tokens = int(routed.sum())
        capacity = expert_capacity(num_tokens, num_experts, self.router.top_k, capacity_factor)
        priority_T = routing.noisy_logits.softmax(dim=-1).amax(dim=-1)
        dropped_TK = over_capacity(expert_indices, priority_T, num_experts, capacity)
        # In full, because TorchScript has no `_replace`
        return RouterOutput(
            routing.logits,
            routing.noisy_logits,
            routing.probabilities,
            routing.expert_indices,
            routing.combine_weights.masked_fill(dropped_TK, 0.0),
            routing.noise_std,
            dropped_TK,
            routed,
        )


def combined_rate(rate: float, other: float) -> float:
    """Rate of two dropouts in a row as one."""
    return 1 - (1 - rate) * (1 - other)
