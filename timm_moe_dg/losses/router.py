"""Load-balancing losses of routers, and access to a model's recorded routing.

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
    """(E,) non-negative -> (std / mean)^2 with the population standard deviation, unless `unbiased`; 0 for zeros."""
    if len(values) == 1:
        return values.sum() * 0.0
    return values.var(correction=int(unbiased)) / values.mean().square().clamp(min=torch.finfo(values.dtype).tiny)


def importance_loss(probabilities: Tensor, routed: Tensor | None = None, unbiased: bool = False) -> Tensor:
    """Squared coefficient of variation of the experts' total routing probability (Shazeer et al., 2017; GMoE, eq. 8).

    Args:
        probabilities: (T, E) routing probabilities without noise.
        routed: (T,) bool, items to include; None for all.
        unbiased: Divide the variance by E - 1 instead of E.
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

    This is V-MoE's form. GMoE's equation takes the threshold after the softmax and compares it with raw logits.

    Experts were chosen from the `noisy_logits` (T, E), which are the `logits` (T, E) with noise of a positive standard
    deviation. Other arguments are those of `importance_loss`.
    """
    # p_te = 1 - Phi((eta_t - logits_te) / noise_std): the probability that expert e is among the K best of item t if
    # its noise alone is drawn again, where eta_t is the K-th largest noisy logit of the item
    threshold_T1 = noisy_logits.topk(top_k, dim=-1).values[:, -1:]
    chances_TE = 0.5 * torch.erfc((threshold_T1 - logits) / (noise_std * math.sqrt(2.0)))
    if routed is not None:
        chances_TE = chances_TE * routed.unsqueeze(1)
    return squared_cv(chances_TE.sum(0), unbiased)


def router_loss(routing: RouterOutput, form: str = "vmoe") -> Tensor:
    """The auxiliary loss of one layer: (importance + load) / 2, or importance alone without noise.

    `form` is 'vmoe', or 'tutel' as in the library behind GMoE's released code.
    """
    if form not in FORMS:
        raise ArgumentError.of("form", form, f"choose one of {FORMS}")
    # Tutel compares the noisy logits with the *probabilities* without noise, and uses the unbiased variance
    tutel = form == "tutel"
    importance = importance_loss(routing.probabilities, routing.routed, unbiased=tutel)
    if routing.noise_std == 0:
        return importance
    top_k = routing.expert_indices.shape[1]
    clean = routing.probabilities if tutel else routing.logits
    load = load_loss(clean, routing.noisy_logits, top_k, routing.noise_std, routing.routed, unbiased=tutel)
    return (importance + load) / 2


def _routed_modules(model: nn.Module) -> Iterator[tuple[str, RoutedMlp]]:
    # By attribute, since scripted layers have another class
    for name, module in model.named_modules():
        if hasattr(module, "record_routing"):
            yield name, cast(RoutedMlp, module)


def router_outputs(model: nn.Module) -> dict[str, RouterOutput]:
    """Returns the last recorded routing of each mixture layer, by module name.

    Each forward in training replaces the record. In evaluation, only forwards inside `record_routing` do. Layers
    without a record are left out.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16")
        >>> logits = model(torch.randn(2, 3, 224, 224))
        >>> timm_moe_dg.router_outputs(model)["blocks.8.mlp"].expert_indices.shape  # 2 x 197 tokens, 2 experts each
        torch.Size([394, 2])
    """
    return {name: module.routing for name, module in _routed_modules(model) if module.routing is not None}


def auxiliary_loss(model: nn.Module, form: str = "vmoe") -> Tensor:
    """Sum of `router_loss` over the mixture layers, for the last training forward (GMoE, section 4.3).

    Call this between forward and backward, once per forward, and add it with a small coefficient (GMoE's code: 0.01).
    The sum is 0 for a model without mixture layers. The model may be wrapped for distributed training.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16", num_classes=7)
        >>> logits = model(torch.randn(2, 3, 224, 224))
        >>> loss = F.cross_entropy(logits, torch.tensor([0, 6])) + 0.01 * timm_moe_dg.auxiliary_loss(model)
    """
    layers = list(_routed_modules(model))
    outputs = router_outputs(model)
    if layers and not outputs:
        remedy = "its mixture layers have recorded no routing; run a forward in training mode"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    losses = [router_loss(routing, form) for routing in outputs.values()]
    if losses:
        return torch.stack(losses).sum()
    return torch.zeros((), device=next((parameter.device for parameter in model.parameters()), None))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which forwards record the routing of each mixture layer in evaluation too.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16").eval()
        >>> with torch.inference_mode(), timm_moe_dg.record_routing(model):
        ...     logits = model(torch.randn(2, 3, 224, 224))
        >>> list(timm_moe_dg.router_outputs(model))
        ['blocks.8.mlp', 'blocks.10.mlp']
    """
    modules = [module for _, module in _routed_modules(model)]
    before = [module.record_routing for module in modules]
    try:
        for module in modules:
            module.record_routing = True
        yield model
    finally:
        for module, value in zip(modules, before, strict=True):
            module.record_routing = value
