"""Routers that can be chosen by name, and MoGE's. `register_router` adds routers from outside this package.

Axes: T items (tokens, or images in MoGE), D features, R projected features, E experts.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ..errors import RouterError, choices, did_you_mean
from .parameters import UpcastLinear, upcast
from .router import Router, top_k_indices

_INIT_LOG_SCALE = math.log(1 / 0.5)  # a temperature of 0.5, as Tutel's cosine gate


def cosine_logits(features: Tensor, codes: Tensor, logit_scale: Tensor) -> Tensor:
    """(T, R) features and (E, R) codes -> (T, E): their cosine times exp(min(logit_scale, log 100))."""
    scaled_codes_ER = F.normalize(codes, dim=-1) * logit_scale.clamp(max=math.log(100.0)).exp()
    norms_T1 = torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp(min=1e-12)  # F.normalize's bound
    # Dividing the E products of an item is cheaper than dividing its R features
    return F.linear(features, scaled_codes_ER) / norms_T1


class LinearRouter(Router):
    """Logits by a linear map of D features without bias (SF-MoE, section 2.2; V-MoE). Arguments as in `Router`."""

    expert_rows = ("gate.weight",)

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
        self.gate = UpcastLinear(in_features, num_experts, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, standard deviation 0.02."""
        trunc_normal_(self.gate.weight, std=0.02)
        self.reset_state()

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
        proj_features: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, top_k, device=device, **options)
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
        self.reset_state()

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


class SelfRouter(Router):
    """Logits are the first E features of the token: no parameters (Self-Routing, arXiv:2604.00421, from its abstract).

    Which features is ours. Arguments as in `Router`.
    """

    def __init__(
        self, in_features: int, num_experts: int, top_k: int, *, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        super().__init__(num_experts, top_k, **options)
        if in_features < num_experts:
            raise RouterError.of("num_experts", num_experts, f"router='self' takes in_features={in_features} at most")

    def reset_parameters(self) -> None:
        """Has none."""
        self.reset_state()

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return x[:, : self.num_experts]


RouterT = TypeVar("RouterT", bound=type[Router])
ROUTERS: dict[str, Callable[..., Router]] = {
    "cosine": CosineRouter,
    "linear": LinearRouter,
    "random": RandomRouter,
    "self": SelfRouter,
}


def register_router(name: str) -> Callable[[RouterT], RouterT]:
    """Registers a subclass of `Router` for token-routed models: `create_model(..., router=name)`.

    Its constructor must accept `in_features`, `num_experts`, `top_k`, `normalize_weights`, `noise_std`, `device` and
    `dtype`. Further arguments are given as `router_kwargs` and saved in `config.json`. Keywords (`**`) are those of
    `Router`.

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
        raise RouterError.of("router", name, did_you_mean(name, ROUTERS) or choices(sorted(ROUTERS)))
    try:
        return ROUTERS[name](**common, **router_kwargs)
    except TypeError as error:
        remedy = f"router={name!r} must take these and {', '.join(common)} ({error})"
        raise RouterError.of("router_kwargs", dict(router_kwargs), remedy) from error
