"""Routers choose the experts of each item and the weights of their outputs.

`register_router` adds routers from outside this package.

Axes: T items (tokens, or images in MoGE), D features, R projected features, E experts, K experts per item (top_k).
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..compat import in_backward
from ..errors import RouterError, choices
from .own_parameters import OwnParameters
from .precision import UpcastLinear, upcast, without_autocast
from .reports.routing import BALANCING_LOSSES, RouterOutput, count_assignments

_INIT_LOG_SCALE = math.log(1 / 0.5)  # a temperature of 0.5, as Tutel's cosine gate


def top_k_indices(scores: Tensor, top_k: int) -> Tensor:
    """(T, E) scores -> (T, K) int64 indices of the K largest, best first; the lowest index wins a tie."""
    # Not torch.topk, which leaves the order of ties open. argmax is exported by every exporter.
    picked = [scores.argmax(dim=-1, keepdim=True)]
    for _ in range(top_k - 1):
        scores = scores.scatter(-1, picked[-1], -float("inf"))
        picked.append(scores.argmax(dim=-1, keepdim=True))
    return torch.cat(picked, dim=-1)


def cosine_logits(features: Tensor, codes: Tensor, logit_scale: Tensor) -> Tensor:
    """(T, R) features and (E, R) codes -> (T, E): their cosine times exp(min(logit_scale, log 100))."""
    scaled_codes_ER = F.normalize(codes, dim=-1) * logit_scale.clamp(max=math.log(100.0)).exp()
    norms_T1 = torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp(min=1e-12)  # F.normalize's bound
    # Dividing the E products of an item is cheaper than dividing its R features
    return F.linear(features, scaled_codes_ER) / norms_T1


class Router(OwnParameters):
    """Noisy top-k routing. Subclasses implement `compute_logits` and `reset_parameters`, and set `undecayed`.

    A subclass may bring its own `loss`, and an `after_step` that moves state without gradients, such as a bias of the
    logits. That state is a buffer. Class attribute `expert_rows`: names of the weights that have a row for each expert,
    for averages of networks.

    Args:
        num_experts: E.
        top_k: K, 1 to E.
        normalize_weights: Scale the K combine weights of an item to sum 1; otherwise they are the raw probabilities.
        noise_std: Standard deviation of the Gaussian noise on the logits in training; None means 1/E
            (GMoE, appendix C.3), 0 means none.

    >>> timm_moe_dg.layers.CosineRouter(8, num_experts=4, top_k=1)(torch.randn(5, 8)).combine_weights.shape
    torch.Size([5, 1])
    """

    expert_rows: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, num_experts: int, top_k: int, normalize_weights: bool = True, noise_std: float | None = None
    ) -> None:
        super().__init__()
        if num_experts < 1:
            raise RouterError.of("num_experts", num_experts, "a router needs at least one expert")
        if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
            raise RouterError.of("top_k", top_k, f"choose 1 to num_experts={num_experts}")
        if noise_std is not None and noise_std < 0:
            raise RouterError.of("router_noise", noise_std, "give a standard deviation of 0 or more, or None for 1/E")
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize_weights = normalize_weights
        self.noise_std = float(1.0 / num_experts if noise_std is None else noise_std)
        self.loss_form = "vmoe"
        # Since the last `after_step`. No buffer: DDP would overwrite it by that of the first process in each forward
        self.expert_counts = torch.zeros(num_experts, dtype=torch.int64)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) features in float32 or better -> (T, E) logits."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute_logits")

    def importance(self, logits: Tensor) -> Tensor:
        """(T, E) logits without noise -> (T, E) routing mass: the softmax over all experts."""
        return logits.softmax(dim=-1)

    def loss(self, routing: RouterOutput) -> Tensor:
        """Auxiliary loss of the last training forward, a scalar: by default the `loss_form` 'vmoe' or 'tutel'."""
        return BALANCING_LOSSES[self.loss_form](routing)

    def after_step(self) -> None:
        """Updates buffers after a step of the optimizer; by default does nothing. `layers.after_step` calls it.

        `expert_counts` (E,) int64 then has the number of each expert's items in the training forwards of the step, in
        all parts of an accumulated batch and in all processes.
        """

    @torch.jit.unused
    def count(self, routing: RouterOutput) -> None:
        """Adds a training forward to `expert_counts`, for routers that have an `after_step`."""
        # Gradient checkpointing repeats forwards in the backward pass
        if self.training and type(self).after_step is not Router.after_step and not in_backward():
            self.expert_counts = self.expert_counts.to(routing.logits.device) + count_assignments(routing)

    def forward(self, x: Tensor) -> RouterOutput:
        """(T, D) features -> the routing of T items, computed in float32 or better."""
        # Without autocast: logits rounded to bfloat16 would route items to other experts
        if torch.jit.is_scripting():
            return self._route(self.compute_logits(upcast(x)))
        else:  # noqa: RET505 (TorchScript skips only the other branch of its own test)
            with without_autocast(x.device.type):
                return self._route(self.compute_logits(upcast(x)))

    def _route(self, logits: Tensor) -> RouterOutput:
        noise_std = self.noise_std if self.training else 0.0
        noisy_logits = logits + torch.randn_like(logits) * noise_std if noise_std > 0 else logits
        scores = noisy_logits.softmax(dim=-1)
        expert_indices = top_k_indices(scores, self.top_k)
        combine_weights = scores.gather(-1, expert_indices)
        if self.normalize_weights:
            combine_weights = combine_weights / combine_weights.sum(dim=-1, keepdim=True)
        mass = self.importance(logits)
        return RouterOutput(logits, noisy_logits, mass, expert_indices, combine_weights, noise_std, None, None)


class LinearRouter(Router):
    """Logits by a linear map of D features without bias (SF-MoE, section 2.2; V-MoE). Arguments as in `Router`."""

    expert_rows = ("gate.weight",)

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        normalize_weights: bool = True,
        noise_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, top_k, normalize_weights, noise_std)
        self.gate = UpcastLinear(in_features, num_experts, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, standard deviation 0.02."""
        trunc_normal_(self.gate.weight, std=0.02)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return self.gate(x)


class CosineRouter(Router):
    """Logits by the scaled cosine between a projection of the item and a code for each expert (GMoE, section 4.3).

    The projection and the codes are R = `proj_features` wide. Other arguments are those of `Router`.
    """

    undecayed = ("codes", "logit_scale")
    expert_rows = ("codes",)

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        normalize_weights: bool = True,
        noise_std: float | None = None,
        proj_features: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, top_k, normalize_weights, noise_std)
        self.proj = UpcastLinear(in_features, proj_features, device=device, dtype=dtype)
        self.codes = nn.Parameter(torch.empty(num_experts, proj_features, device=device, dtype=dtype))
        self.logit_scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Codes from N(0, 0.01), scale 2, projection from a truncated normal with standard deviation 0.02."""
        trunc_normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)
        nn.init.normal_(self.codes, std=0.01)
        nn.init.constant_(self.logit_scale, _INIT_LOG_SCALE)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return cosine_logits(self.proj(x), upcast(self.codes), upcast(self.logit_scale))


class MetadataRouter(Router):
    """Logits by the scaled cosine between a metadata embedding and a code for each expert (MoGE, equation 1).

    The combine weights are the softmax over the K best experts alone, with sum 1. With K = 1 the weight is the constant
    1, and only the auxiliary loss trains the router. The embedding and the codes are R = `context_features` wide. Other
    arguments are those of `Router`.
    """

    undecayed = ("codes", "logit_scale")
    expert_rows = ("codes",)

    def __init__(
        self,
        context_features: int,
        num_experts: int,
        top_k: int,
        *,
        noise_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, top_k, True, noise_std)
        self.codes = nn.Parameter(torch.empty(num_experts, context_features, device=device, dtype=dtype))
        self.logit_scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Codes from N(0, 0.01), scale 2."""
        nn.init.normal_(self.codes, std=0.01)
        nn.init.constant_(self.logit_scale, _INIT_LOG_SCALE)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(B, R) -> (B, E)."""
        return cosine_logits(x, upcast(self.codes), upcast(self.logit_scale))

    def importance(self, logits: Tensor) -> Tensor:
        """(B, E) logits without noise -> (B, E) mixture weights alpha, zero outside the K best (MoGE, appendix A)."""
        best = top_k_indices(logits, self.top_k)
        return torch.zeros_like(logits).scatter(-1, best, logits.gather(-1, best).softmax(dim=-1))


RouterT = TypeVar("RouterT", bound=type[Router])
ROUTERS: dict[str, Callable[..., Router]] = {"cosine": CosineRouter, "linear": LinearRouter}


def register_router(name: str) -> Callable[[RouterT], RouterT]:
    """Registers a subclass of `Router` for token-routed models: `create_model(..., router=name)`.

    Its constructor must accept `in_features`, `num_experts`, `top_k`, `normalize_weights`, `noise_std`, `device` and
    `dtype`. Further arguments are given as `router_kwargs` and saved in `config.json`.

    >>> @timm_moe_dg.layers.register_router("my_router")
    ... class MyRouter(timm_moe_dg.layers.LinearRouter):
    ...     def importance(self, logits):
    ...         return logits.sigmoid()
    >>> model = timm.create_model("gmoe_tiny_patch16", router="my_router")
    """

    def register(router: RouterT) -> RouterT:
        if not (isinstance(router, type) and issubclass(router, Router)):
            raise RouterError.of("router", name, f"{router!r} is not a subclass of timm_moe_dg.layers.Router")
        other = ROUTERS.get(name)
        # Names are compared rather than classes: a notebook's cell that runs twice defines a new class
        if other is not None and (other.__module__, other.__qualname__) != (router.__module__, router.__qualname__):
            remedy = f"{other.__module__}.{other.__qualname__} has this name; choose another"
            raise RouterError.of("router", name, remedy)
        ROUTERS[name] = router
        return router

    return register


def build_router(name: str, router_kwargs: Mapping[str, object], **common: Any) -> Router:
    """Builds the router of a token-routed layer by name, from its own options and those that all routers have."""
    if name not in ROUTERS:
        raise RouterError.of("router", name, choices(sorted(ROUTERS)))
    parameters = inspect.signature(ROUTERS[name]).parameters
    if (lacking := common.keys() - parameters) and not any(
        part.kind is part.VAR_KEYWORD for part in parameters.values()
    ):
        raise RouterError.of("router", name, f"its constructor must accept {', '.join(sorted(lacking))}")
    options = [option for option in parameters if option not in common]
    if not set(router_kwargs) <= set(options):
        raise RouterError.of("router_kwargs", dict(router_kwargs), f"router={name!r} takes {options or 'no options'}")
    return ROUTERS[name](**common, **router_kwargs)
