"""Merging of experts: a mixture becomes the plain timm network that it was upcycled from, or could have been.

Axes: E experts.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import timm
import torch
from timm.models import get_model_args, get_model_input_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..errors import ArgumentError, MetadataError
from ..layers import RoutedMlp
from ..layers.dense.feed_forwards import FeedForward, read_feed_forward
from ..losses import record_routing, router_outputs
from .build import Network, without_origin
from .soups import mean_weights

Layers: TypeAlias = dict[str, Any]  # mixture layers by name: mypy types attributes of modules as Tensor or Module


@torch.no_grad()
def merge_experts(
    network: Network,
    images: Iterable[Tensor],
    *,
    alpha: float | None = None,
    lonlat: tuple[float, float] | None = None,
) -> Network:
    """Returns a plain timm network, in which each mixture layer is one feed-forward.

    Its matrices and biases are means of the experts' ones. With `alpha` 0, the default, all experts count alike. With 1
    each counts by its mean combine weight over `images`. A shared expert counts by its gate. MoGE becomes its shared
    expert or, with `lonlat`, the experts that its router weights there. ExFusion (arXiv:2603.27965, its abstract alone
    was read) learns the experts' weights in training. These are computed afterwards.

    The mean of weights is not the mean of outputs, because an activation lies between the matrices. Both agree where
    experts are equal. Combine weights that do not sum to 1 scale the output of each token. The second matrix and bias
    are multiplied by the mean of that scale.

    Args:
        network: In evaluation mode. It is not changed.
        images: Batches (B, C, H, W), read only if the experts' weights depend on them.
        alpha: From 0 to 1, for experts that are routed by tokens.
        lonlat: Longitude and latitude in degrees, for experts that are routed by coordinates.

    Raises:
        ArgumentError: There are no experts, or the rest of the network is none of timm's.
    """
    name = network.pretrained_cfg["architecture"]
    layers: Layers = {place: module for place, module in network.named_modules() if isinstance(module, RoutedMlp)}
    if not layers:
        reads = (
            "; its classifier reads places, as no plain network does" if hasattr(network, "metadata_encoder") else ""
        )
        raise ArgumentError.of("model", name, f"has no experts to merge{reads}; give a GMoE, SF-MoE or MoGE")
    if (width := getattr(next(iter(layers.values())), "expert_width", 1)) != 1:
        remedy = "a plain network has no narrower feed-forwards in some blocks; train with expert_width=1"
        raise ArgumentError.of("expert_width", width, remedy)
    plain = _build_plain(network, name)
    weights = _expert_weights(network, layers, images, alpha, lonlat)
    for place, layer in layers.items():
        _fill(read_feed_forward(plain.get_submodule(place)), layer, weights[place])
    # A module may have several names
    places = [place for place, module in network.named_modules(remove_duplicate=False) if isinstance(module, RoutedMlp)]
    inside = tuple(f"{place}." for place in places)
    others = {key: value for key, value in network.state_dict().items() if not key.startswith((*inside, "metadata_"))}
    try:
        plain.load_state_dict({key: others.get(key, value) for key, value in plain.state_dict().items()} | others)
    except RuntimeError as error:
        reason = f"timm's network has other weights ({str(error).splitlines()[1].strip()})"
        raise ArgumentError.of("model", name, f"{reason}; merge a model with default options") from error
    return plain.eval()


def dense_name(network: Network) -> str:
    """Returns the timm model that the dense weights of a mixture come from, or nothing if none is recorded."""
    if hasattr(network, "mixture_args"):
        return str(network.mixture_args["backbone"]).partition(".")[0]
    cfg = timm.get_pretrained_cfg(network.pretrained_cfg["architecture"])
    return ((cfg and cfg.hf_hub_id) or "").rpartition("/")[2].partition(".")[0]


def _build_plain(network: Network, name: str) -> Network:
    """Builds the plain network, with new weights, and with the mixture's classes, bands and preprocessing."""
    dense, args = dense_name(network), get_model_args(network)
    if args.get("text_head") or not dense:
        reason = "timm has no text heads" if dense else "its configuration names no dense weights (hf_hub_id)"
        raise ArgumentError.of("model", name, f"{reason}; merge another model")
    own = getattr(network, "mixture_args", None)
    taken = inspect.signature(VisionTransformer).parameters if own is None else args.keys() - own.keys()
    plain: Network = timm.create_model(dense, **{key: value for key, value in args.items() if key in taken})
    plain.bands = getattr(network, "bands", None)
    plain.pretrained_cfg = plain.default_cfg = {**without_origin(network.pretrained_cfg), "architecture": dense}
    return plain


def _expert_weights(
    network: Network,
    layers: Layers,
    images: Iterable[Tensor],
    alpha: float | None,
    lonlat: tuple[float, float] | None,
) -> dict[str, Tensor]:
    """Weights of each layer's experts, float64 (E,), or (E + 1,) with a shared expert, which comes last."""
    routers = {place: layer.router for place, layer in layers.items()}
    by_place = hasattr(network, "expert_mode")
    if by_place and alpha is not None:
        raise ArgumentError.of("alpha", alpha, "MoGE's experts are weighted by the place; leave it out, or give --at")
    if not by_place and lonlat is not None:
        raise ArgumentError.of("at", lonlat, "the model does not route by places; leave it out")
    if by_place and lonlat is None and any(layer.shared is None for layer in layers.values()):
        raise ArgumentError.of("at", None, "the model has no shared expert; give the place whose experts are merged")
    use = {place: torch.full([router.num_experts], 1 / router.num_experts) for place, router in routers.items()}
    if lonlat is not None:
        device = next(network.parameters()).device
        image = torch.zeros(1, *get_model_input_config(network)["input_size"], device=device)
        try:
            use = mean_combine_weights(network, [(image, torch.tensor([lonlat], device=device))])
        except MetadataError as error:
            raise ArgumentError.of("at", lonlat, str(error)) from error
        if any(used.isnan().any() for used in use.values()):
            raise ArgumentError.of("at", lonlat, "the model uses its shared expert alone there; leave it out")
    elif alpha or not all(router.normalize_weights for router in routers.values()):
        use = mean_combine_weights(network, ((batch,) for batch in images))
    mixed = alpha if alpha is not None else float(lonlat is not None)
    weights = {place: mixed * used.double() + (1 - mixed) * used.double().mean() for place, used in use.items()}
    for place, layer in layers.items():
        if layer.shared is not None:
            gate = (
                layer.gamma.sigmoid().double().cpu() if lonlat is not None or not by_place else torch.ones(1).double()
            )
            weights[place] = torch.cat([(1 - gate) * weights[place], gate])
    return weights


@torch.no_grad()
def mean_combine_weights(network: Network, batches: Iterable[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Mean combine weight of each expert over all routed items of batches, float64 (E,), by mixture layer."""
    sums: dict[str, Tensor] = {}
    with record_routing(network):
        for batch in batches:
            network(*batch)
            for place, routing in router_outputs(network).items():
                weights_TE = routing.logits.new_zeros(routing.logits.shape, dtype=torch.float64)
                weights_TE.scatter_(1, routing.expert_indices, routing.combine_weights.double())
                weights_TE = weights_TE if routing.routed is None else weights_TE[routing.routed]
                counted = torch.cat([weights_TE, torch.ones_like(weights_TE[:, :1])], dim=1).sum(0)
                sums[place] = sums.get(place, 0) + counted
    return {place: (total[:-1] / total[-1]).cpu() for place, total in sums.items()}


def _fill(dense: FeedForward, layer: Any, weights: Tensor) -> None:
    """Sets a dense feed-forward to the weighted mean of experts, and scales its output by the sum of the weights."""
    shares, shared = weights / weights.sum(), [] if layer.shared is None else [read_feed_forward(layer.shared)]
    for is_second, stack in enumerate((layer.fc1, layer.fc2)):
        for kind, values in stack.named_parameters(recurse=False):
            further = [torch.cat(_parameters(part, is_second, kind)).view(1, *values.shape[1:]) for part in shared]
            mean = torch.tensordot(shares, torch.cat([values, *further]).double().cpu(), dims=1)
            mean = mean * weights.sum() if is_second else mean
            targets = _parameters(dense, is_second, kind)
            for target, rows in zip(targets, mean.split([len(target) for target in targets]), strict=True):
                target.copy_(rows.view_as(target))
    # Experts have normalizations and activations in common
    share = shares[len(layer.fc1.weight) :].sum().item()
    common = {"pre_norm": getattr(layer, "norm", nn.Identity()), "norm": layer.experts.norm, "act": layer.experts.act}
    for part, module in common.items():
        states = [module.state_dict(), *(getattr(other, part).state_dict() for other in shared)]
        getattr(dense, part).load_state_dict(mean_weights(states, [1 - share, share][: len(states)]))


def _parameters(feed_forward: FeedForward, is_second: int, kind: str) -> list[Tensor]:
    layers = [feed_forward.second] if is_second else feed_forward.first
    return [layer.get_parameter(kind) for layer in layers]
