"""Load-balancing losses of the routers, and how to reach the routing that a model recorded.

Axes: T items (tokens, or images in MoGE), E experts, K experts per item.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import RoutedMlp, RouterOutput

FORMS = ("vmoe", "tutel")


def squared_cv(values: Tensor, unbiased: bool = False) -> Tensor:
    """(E,) non-negative -> scalar: (std / mean)^2, with the population standard deviation unless `unbiased`.

    All zeros (no item was routed) are balanced: 0.
    """
    if len(values) == 1:
        return values.sum() * 0.0
    return values.var(correction=int(unbiased)) / values.mean().square().clamp(min=torch.finfo(values.dtype).tiny)


def importance_loss(probabilities: Tensor, routed: Tensor | None = None, unbiased: bool = False) -> Tensor:
    """Squared coefficient of variation of the experts' total routing probability (Shazeer et al., 2017; GMoE, eq. 8).

    Args:
        probabilities: (T, E) noiseless routing probabilities.
        routed: (T,) bool, the items that count; None for all.
        unbiased: Divide the variance by E - 1 instead of E.

    Returns:
        Scalar; 0 when every expert has the same importance.
    """
    if routed is not None:
        probabilities = probabilities * routed.unsqueeze(1)
    return squared_cv(probabilities.sum(0), unbiased)


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    top_k: int,
    noise_std: float,
    routed: Tensor | None = None,
    unbiased: bool = False,
) -> Tensor:
    """Squared coefficient of variation of the experts' expected number of items (GMoE, eq. 10; V-MoE, appendix A).

    p_te = 1 - Phi((eta_t - logits_te) / noise_std) is the probability that expert e is among the K best of item t when
    only its own noise is drawn again, eta_t being the K-th largest noisy logit of the item.

    Args:
        logits: (T, E) before noise.
        noisy_logits: (T, E) the selection was made from these.
        top_k: K.
        noise_std: Standard deviation of the noise, positive.
        routed: (T,) bool, the items that count; None for all.
        unbiased: Divide the variance by E - 1 instead of E.

    Returns:
        Scalar; 0 when every expert expects the same load.
    """
    threshold_T1 = noisy_logits.topk(top_k, dim=-1).values[:, -1:]
    chances_TE = 0.5 * torch.erfc((threshold_T1 - logits) / (noise_std * math.sqrt(2.0)))
    if routed is not None:
        chances_TE = chances_TE * routed.unsqueeze(1)
    return squared_cv(chances_TE.sum(0), unbiased)


def router_loss(routing: RouterOutput, form: str = "vmoe") -> Tensor:
    """The auxiliary loss of one layer: (importance + load) / 2, or importance alone where there was no noise.

    Args:
        routing: What a forward of the layer recorded.
        form: 'vmoe', or 'tutel' for the arithmetic of the library behind GMoE's released code: it compares the
            noisy logits with the noiseless *probabilities* and uses the unbiased variance.

    Returns:
        Scalar.

    Raises:
        ArgumentError: Unknown `form`.
    """
    if form not in FORMS:
        raise ArgumentError.of("form", form, f"choose one of {FORMS}")
    tutel = form == "tutel"
    importance = importance_loss(routing.probabilities, routing.routed, unbiased=tutel)
    if routing.noise_std == 0:
        return importance
    top_k = routing.expert_indices.shape[1]
    clean = routing.probabilities if tutel else routing.logits
    load = load_loss(clean, routing.noisy_logits, top_k, routing.noise_std, routing.routed, unbiased=tutel)
    return (importance + load) / 2


def _routed_modules(model: nn.Module) -> Iterator[tuple[str, RoutedMlp]]:
    # By attribute: a scripted layer has lost its class, and must be told from a model without any
    found = ((name, module) for name, module in model.named_modules() if hasattr(module, "record_routing"))
    return ((name, cast(RoutedMlp, module)) for name, module in found)


def router_outputs(model: nn.Module) -> dict[str, RouterOutput]:
    """The last recorded routing of each mixture layer.

    A forward records in training, and in evaluation inside `record_routing`; each record replaces the one before.

    Returns:
        Module name -> its routing, without the layers that recorded nothing yet.
    """
    return {name: module.routing for name, module in _routed_modules(model) if module.routing is not None}


def auxiliary_loss(model: nn.Module, form: str = "vmoe") -> Tensor:
    """Sum of `router_loss` over the mixture layers, from the last training forward (GMoE, section 4.3).

    Call it between forward and backward, once per forward, and add it with a small coefficient (the papers' is 0.01).

    Args:
        model: Any model, also wrapped for distributed training; one without mixture layers gives 0.
        form: See `router_loss`.

    Returns:
        Scalar on the model's device, connected to the routers' parameters.

    Raises:
        ArgumentError: There are mixture layers and none has recorded a routing.
    """
    layers = list(_routed_modules(model))
    outputs = router_outputs(model)
    if layers and not outputs:
        raise ArgumentError.of("model", type(model).__name__, "no routing is recorded; run a forward in training mode")
    losses = [router_loss(routing, form) for routing in outputs.values()]
    if losses:
        return torch.stack(losses).sum()
    return torch.zeros((), device=next((parameter.device for parameter in model.parameters()), None))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[nn.Module]:
    """Within the context every forward, also in evaluation, records the routing of each mixture layer."""
    modules = [module for _, module in _routed_modules(model)]
    before = [module.record_routing for module in modules]
    try:
        for module in modules:
            module.record_routing = True
        yield model
    finally:
        for module, value in zip(modules, before, strict=True):
            module.record_routing = value
