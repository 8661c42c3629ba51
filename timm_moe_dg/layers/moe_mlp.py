"""Sparse mixture-of-experts feed-forward layer, a replacement for timm's Mlp.

Axes: B images, N tokens per image, T = B * N tokens, D features, E experts, K experts per token.
"""

import copy
from functools import partial
from typing import Any, Self

import torch
from timm.layers import GluMlp, Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..errors import ArgumentError, RouterError
from .assignments import expert_capacity, over_capacity
from .experts import StackedExperts, StackedLinear
from .feed_forwards import GatedActivation, read_feed_forward
from .mixture_options import GeoMixtureOptions, MixtureOptions, build_options
from .parameters import OwnParameters
from .reports import LossWeights, ReportedLoss, RouterOutput, image_balance_loss, z_loss
from .router import Router
from .routers import build_router


class RoutedMlp(OwnParameters):
    """Base of the mixture layers: stacked experts, a router, a record of the last routing, and a shared expert's gate.

    Each forward in training overwrites `routing`. In evaluation it does so while `record_routing` is set.
    """

    undecayed = ("gamma",)
    gamma: nn.Parameter | None
    router: Router
    shared: nn.Module | None
    options: MixtureOptions | GeoMixtureOptions

    def __init__(self, experts: StackedExperts) -> None:
        super().__init__()
        self.experts = experts
        self.record_routing = False
        # Overwritten and never added to: gradient checkpointing runs a forward twice and must leave one record
        self.routing: RouterOutput | None = None
        self.is_training_record = False  # whether `routing` is that of a training forward

    @property
    def fc1(self) -> StackedLinear:
        """First layer of all experts, under the name that timm's Mlp uses."""
        return self.experts.fc1

    @property
    def fc2(self) -> StackedLinear:
        """Second layer of all experts, under the name that timm's Mlp uses."""
        return self.experts.fc2

    def reset_parameters(self) -> None:
        """Half shared, half routed; the submodules initialize themselves."""
        if self.gamma is not None:
            nn.init.zeros_(self.gamma)

    def changes_dense(self) -> list[str]:
        """Names the options with which an upcycled layer does not compute what its dense source does."""
        raw = not self.router.normalize_weights and self.router.num_experts > 1
        reasons = [f"top_k={self.router.top_k} with combine weights that do not sum to 1"] if raw else []
        neutral = {"expert_width": 1, "expert_reinit": 0, "expert_perturbation": 0}
        given = {name: value for name, value in vars(self.options).items() if name in neutral}
        return reasons + [f"{name}={value}" for name, value in given.items() if value != neutral[name]]

    def take_shared(self, dense: nn.Module) -> None:
        """Makes the shared expert, if there is one, a copy of a dense feed-forward."""
        if self.shared is not None:
            self.shared = copy.deepcopy(dense)
            if hasattr(dense, "drop2"):
                self.shared.drop2 = nn.Dropout(0.0)  # acts once, behind the sum

    def record(self, routing: RouterOutput) -> None:
        """Keeps the routing of a forward, in training or on demand."""
        if self.training or self.record_routing:
            self.routing, self.is_training_record = routing, self.training
            self.router.count(routing)

    def training_routing(self) -> RouterOutput | None:
        """Returns the routing of the last training forward; None if there was none.

        Raises:
            ArgumentError: An evaluation was recorded since. Its losses would have no gradient.
        """
        if self.routing is not None and not self.is_training_record:
            remedy = "the last recorded forward was in evaluation; run a training forward before its losses"
            raise ArgumentError.of("model", type(self).__name__, remedy)
        return self.routing

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the router's losses, see `layers.reports`."""
        routing = self.training_routing()
        if routing is None:
            return {}
        losses = {"aux_loss": ReportedLoss(self.router.loss(routing), weights.aux_coef)}
        if weights.z_coef:
            losses["z_loss"] = ReportedLoss(z_loss(routing), weights.z_coef)
        return losses

    def __getstate__(self) -> dict[str, object]:
        # A recorded routing belongs to a graph, so it can be neither copied (weight averaging) nor pickled
        return dict(self.__dict__, routing=None)


@torch.no_grad()
def after_step(model: nn.Module, *, moves: bool = True) -> None:
    """Calls `Router.after_step` of every router; call this once after each optimizer step of a training loop.

    Without `moves` the forwards since the last call do not count, as those of a step that left the network unchanged.
    The routers' `expert_counts` are added over the processes of torch.distributed before, and start at 0 afterwards.
    Models without a router that has an `after_step` are left as they are. The model may be wrapped for distributed
    training.

    >>> model = timm.create_model("gmoe_tiny_patch16")
    >>> timm_moe_dg.after_step(model)
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    for router in model.modules():
        if isinstance(router, Router) and router.has_after_step():
            for name in ("expert_counts", "threshold_sums") if several and moves else ():
                if (value := getattr(router, name)) is not None:
                    setattr(router, name, value.to(next(model.parameters()).device))
                    torch.distributed.all_reduce(getattr(router, name))
            if moves:
                router.after_step()
            router.reset_counts()


@register_notrace_module
class MoeMlp(RoutedMlp):
    """Sparse mixture of feed-forward experts with token-level routing (GMoE, section 4.2; SF-MoE, section 2.2).

    The path of a token x_D: (1) the router scores the E experts and picks K; (2) each of them computes
    W2 act(W1 x + b1) + b2; (3) the outputs are added, weighted by the combine weights. By default no token is dropped.
    A `capacity_factor` drops tokens in training alone, so a prediction never depends on its batch neighbors.

    With `shared_expert` the layer is g f_0(x) + (1 - g) y(x), where every token visits the shared expert f_0, y is the
    sum above, and g = sigmoid(gamma) is learned, from 1/2. DeepSeekMoE (arXiv:2401.06066, equation 9) adds f_0(x) and
    y(x). The mean keeps the output of an upcycled network.

    Padding is not routed, and y is 0 there. A network that pads sets `valid` before each forward, (B, N) bool, False
    for padding. `upcycle` does so for timm's NaFlex networks.

    Takes timm's `Mlp` arguments, so that it can be a block's `mlp_layer`.

    Args:
        in_features: D.
        hidden_features: Hidden width of each expert, before `expert_width`; None means `in_features`.
        out_features: As timm's Mlp has it; must equal `in_features` here.
        norm_layer: Normalization of the hidden features, shared by the experts; None for none.
        bias: Whether the experts' layers have biases; a pair sets them apart.
        drop: timm's projection dropout: after the activation and after the layer, in training.
        gated: Whether the experts multiply by a gate, see `StackedExperts`.
        channels_first: Whether the layer takes and returns (B, D, height, width) instead of (..., D).
        options: All options of the mixture, in place of single ones.
        **mixture: Single options of `MixtureOptions`. `expert_drop` acts besides `drop`, and is 0 here by default.
    """

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
        gated: bool = False,
        channels_first: bool = False,
        options: MixtureOptions | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **mixture: Any,
    ) -> None:
        if out_features not in (None, in_features):
            raise RouterError.of("out_features", out_features, f"experts return in_features={in_features} features")
        options = options or build_options(MixtureOptions, {"expert_drop": 0.0, **mixture}, type(self).__name__)
        hidden_features = hidden_features or in_features
        layers: dict[str, Any] = {"act_layer": act_layer, "norm_layer": norm_layer, "bias": bias}
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        further: dict[str, Any] = {"hidden_drop": combined_rate(drop, options.expert_drop), **layers, **dd}
        width = max(1, round(options.expert_width * hidden_features))
        super().__init__(StackedExperts(options.num_experts, in_features, width, gated=gated, **further))
        self.options: MixtureOptions = options
        self.channels_first = channels_first
        self.shared, self.gamma = None, None
        if options.shared_expert:
            make = partial(GluMlp, gate_last=False) if gated else Mlp
            # The shared expert has no second dropout: the layer's own acts once, behind the sum
            width = hidden_features * (1 + gated)
            self.shared = make(in_features, width, **layers, drop=(drop, 0.0), use_conv=channels_first, **dd)
            self.gamma = nn.Parameter(torch.zeros(1, **dd))
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
            **dd,
        )
        self.drop = nn.Dropout(drop)

    @classmethod
    def from_dense(cls, mlp: nn.Module, options: MixtureOptions | None = None, **mixture: Any) -> Self:
        """Upcycles a dense feed-forward, see `read_feed_forward`: every expert starts as a copy, the router at random.

        The experts share one copy of the activation and the normalizations. A normalization of the input acts before
        the router too. Dropout rates, frozen parameters and the mode are kept, and `expert_drop` acts besides. The
        options are those of the layer. The evaluation output equals the dense one where the combine weights
        sum to 1, and experts are whole copies (see `changes_dense`).
        """
        options = options or build_options(MixtureOptions, {"expert_drop": 0.0, **mixture}, cls.__name__)
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
            options=options,
        )
        if options.expert_width != 1 and not isinstance(dense.norm, nn.Identity):
            remedy = "experts cannot be parts of a feed-forward that normalizes its hidden features; leave it 1"
            raise RouterError.of("expert_width", options.expert_width, remedy)
        moe.experts.load_dense(dense, reinit=options.expert_reinit)
        moe.take_shared(mlp)
        moe.norm = copy.deepcopy(dense.pre_norm)
        moe.experts.drop.p = combined_rate(dense.hidden_drop, options.expert_drop)
        moe.drop.p = dense.drop
        return moe.train(mlp.training)

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the router's losses, and the balance of experts within images."""
        losses = super().training_losses(targets, weights)
        if self.routing is not None and weights.image_coef:
            losses["image_loss"] = ReportedLoss(image_balance_loss(self.routing, len(targets)), weights.image_coef)
        return losses

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) tokens -> (..., D); (B, D, height, width) both if channels come first."""
        if self.channels_first:
            return self._mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self._mix(x)

    def _mix(self, x: Tensor) -> Tensor:
        tokens_TD = self.norm(x.reshape(-1, x.shape[-1]))
        valid, self.valid = self.valid, None  # the mask is for one forward
        routing = self.router(tokens_TD, None if valid is None else valid.flatten())
        expert_indices = routing.expert_indices
        # Index E is no expert: its assignments are skipped
        if routing.routed is not None:
            expert_indices = expert_indices.masked_fill(~routing.routed.unsqueeze(1), self.experts.num_experts)
        routing = self._limit(routing, expert_indices)
        if routing.dropped is not None:
            expert_indices = expert_indices.masked_fill(routing.dropped, self.experts.num_experts)
        output = self.experts(tokens_TD, expert_indices, routing.combine_weights).view(x.shape)
        self.record(routing)
        if self.shared is not None and self.gamma is not None:
            gate = self.gamma.sigmoid().to(output.dtype)
            first = self.channels_first
            shared = self.shared(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) if first else self.shared(x)
            output = gate * shared + (1.0 - gate) * output
        return self.drop(output)

    def _limit(self, routing: RouterOutput, expert_indices: Tensor) -> RouterOutput:
        """Drops the assignments over capacity, in training with a capacity factor."""
        if self.capacity_factor is None or not self.training:
            return routing
        num_tokens, num_experts = routing.logits.shape
        if routing.routed is not None:
            num_tokens = int(routing.routed.sum())
        capacity = expert_capacity(num_tokens, num_experts, self.router.top_k, self.capacity_factor)
        priority_T = routing.noisy_logits.softmax(dim=-1).amax(dim=-1)
        dropped_TK = over_capacity(expert_indices, priority_T, num_experts, capacity)
        combine_weights = routing.combine_weights.masked_fill(dropped_TK, 0.0)
        return routing._replace(combine_weights=combine_weights, dropped=dropped_TK)


def combined_rate(rate: float, other: float) -> float:
    """Rate of two dropouts in a row as one."""
    return 1 - (1 - rate) * (1 - other)
