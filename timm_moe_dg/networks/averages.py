"""Averages: of the weights of several networks, of their probabilities (ensembles), and of the experts of one network.

Axes: E experts.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import timm
import torch
from timm.models import get_model_args, get_model_input_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..cli.values import LOCAL
from ..data import evaluation_transform
from ..data.readers.images import Pixels, Transform
from ..errors import ArgumentError, MetadataError
from ..layers import RoutedMlp
from ..layers.experts import StackedLinear
from ..layers.feed_forwards import FeedForward, read_feed_forward
from ..layers.router import Router
from ..losses import record_routing, router_outputs
from .bands import bands_of
from .build import DataConfig, Network, data_config, ensemble_members, without_origin
from .trained import label_names, load_trained

Weights = Mapping[str, Tensor]  # a network's state_dict
Layers: TypeAlias = dict[str, Any]  # mixture layers by name: mypy types attributes of modules as Tensor or Module


def mean_weights(members: Sequence[Weights], shares: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Returns the mean of weights, with `shares` that sum to 1, or in equal parts.

    Whole-number buffers are those of the last member. Thresholds of routers that took no step do not count beside
    others. Other names or shapes than the first member's are an `ArgumentError`.
    """
    for before, after in pairwise(members):
        differing = [name for name in before.keys() | after.keys() if _shape(before, name) != _shape(after, name)]
        if differing:
            name = min(differing)
            shapes = f"{_shape(before, name)} in one network and {_shape(after, name)} in another"
            raise ArgumentError.of("weights", name, f"{shapes}; average equal networks")
    largest = {name: 1.0 if name.endswith("expert_thresholds") else torch.inf for name in members[0]}
    return {name: _mean([member[name] for member in members], shares, largest[name]) for name in members[0]}


def _shape(weights: Weights, name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def _mean(values: Sequence[Tensor], shares: Sequence[float] | None, largest: float) -> Tensor:
    """The mean of the values up to `largest`; a larger one where there is no other."""
    if not values[-1].is_floating_point():
        return values[-1]
    # In float64 the mean of equal float32 weights is exact
    wide = torch.stack([value.double() for value in values])
    counted = wide.new_tensor(shares or [1.0] * len(values)).view(-1, *[1] * values[-1].ndim) * ~(wide > largest)
    total = counted.sum(0)
    mean = (wide.where(counted > 0, 0.0) * counted).sum(0) / total
    return mean.where(total > 0, wide.amax(0)).to(values[-1].dtype)


def restricted_selection(scores: Sequence[float], correct: Callable[[Sequence[int]], float]) -> list[int]:
    """Selects the members of an average (DiWA, Rame et al., NeurIPS 2022, arXiv:2205.09739, algorithm 1).

    As in the released code, candidates are ranked by the mean of their validation accuracies over domains. An average
    is accepted if no fewer images of all domains' validation splits together are classified correctly.

    Args:
        scores: Mean validation accuracy of each candidate.
        correct: Returns the number of validation images that the average of some candidates classifies correctly, or
            another score.

    Returns:
        The candidates in order, without those that would lower the number.
    """
    selected: list[int] = []
    best = -1.0
    # Rounded, because means of equal accuracies may differ in the last bits
    for candidate in sorted(range(len(scores)), key=lambda candidate: -round(scores[candidate], 12)):
        count = correct([*selected, candidate])
        if count >= best:
            selected, best = [*selected, candidate], count
    return selected


def _expert_rows(module: nn.Module) -> Iterable[str]:
    """Names of a module's own weights that have a row for each expert."""
    if isinstance(module, Router) and not module.expert_rows:
        remedy = "does not name the weights of an expert (`expert_rows`); leave out --match-experts"
        raise ArgumentError.of("router", type(module).__name__, remedy)
    if isinstance(module, StackedLinear):
        return module.state_dict()
    return module.expert_rows if isinstance(module, Router) else ()


def match_experts(network: nn.Module, reference: Weights, weights: Weights) -> dict[str, Tensor]:
    """Orders experts like those of `reference`, which changes no output.

    Layer by layer, the order minimizes the sum of squared differences of all experts' weights and of their rows in the
    router (scipy's `linear_sum_assignment`). `network` shows which weights belong to experts.
    """
    from scipy.optimize import linear_sum_assignment

    matched = dict(weights)
    for layer, module in network.named_modules():
        if not isinstance(module, RoutedMlp):
            continue
        names = [f"{layer}.{name}.{row}" for name, part in module.named_modules() for row in _expert_rows(part)]
        rows = [[table[name].double().flatten(1) for name in names] for table in (reference, weights)]
        first, second = (torch.cat(parts, dim=1) for parts in rows)
        order = linear_sum_assignment(torch.cdist(first, second).square().numpy())[1]
        # A bias of an expert moves with it, and says nothing about likeness
        names += [f"{layer}.router.{state}" for state in Router.expert_state if f"{layer}.router.{state}" in weights]
        matched |= {name: weights[name][order] for name in names}
    return matched


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
    if (width := next(iter(layers.values())).options.expert_width) != 1:
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
    plain.bands = bands_of(network)
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


class Ensemble(nn.Module):
    """Mean of the class probabilities of several networks, returned as logits: their logarithms.

    Images are transformed by `view`. Metadata is the same for all members. Classes have the order and the names of the
    first member, and members with other classes are an `ArgumentError`. EoA (Arpit et al., NeurIPS 2022,
    arXiv:2110.10832) averages logits instead.

    Args:
        networks: The members, in evaluation mode.
        img_size: Side of the input in pixels; None for that of each member.
    """

    def __init__(self, networks: Sequence[Network], img_size: int | None = None) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.configs = [data_config(network, img_size) for network in networks]
        self.orders = [_order(network, networks[0]) for network in networks]
        self.num_classes = networks[0].num_classes
        self.pretrained_cfg = {**networks[0].pretrained_cfg, "input_size": self.configs[0]["input_size"]}
        for name in ("metadata_encoder", "expert_mode", "bands"):  # of members that have them
            if hasattr(networks[0], name):
                setattr(self, name, getattr(networks[0], name))

    @property
    def view(self) -> Transform:
        """The transform from an image to the input of `forward`."""
        if self._is_uniform:
            return _transform(self.configs[0])
        return partial(_side_by_side, [_transform(config) for config in self.configs])

    @property
    def _is_uniform(self) -> bool:
        return all(config == self.configs[0] for config in self.configs)

    def forward(self, images: Tensor, *metadata: Tensor) -> Tensor:
        """(B, C, H, W) images, or (B, P) rows of `view`, and metadata -> (B, num_classes)."""
        logits = [network(view, *metadata) for network, view in zip(self.networks, self._inputs(images), strict=True)]
        ordered = [values.float()[:, order] for values, order in zip(logits, self.orders, strict=True)]
        # The logarithm of a mean of probabilities, without underflow
        return torch.stack(ordered).log_softmax(-1).logsumexp(0) - math.log(len(ordered))

    def _inputs(self, images: Tensor) -> Sequence[Tensor]:
        if self._is_uniform:
            return [images] * len(self.configs)
        shapes = [config["input_size"] for config in self.configs]
        parts = images.split([math.prod(shape) for shape in shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def load_predictor(name: str, *, img_size: int | None = None, **keywords: Any) -> Network:
    """Loads a trained network, see `load_trained`, or the ensemble that `average --method ensemble` wrote."""
    members = ensemble_members(Path(name.removeprefix(LOCAL))) if name.startswith(LOCAL) else []
    if not members:
        return load_trained(name, img_size=img_size, **keywords)
    networks = [load_trained(f"{LOCAL}{member}", img_size=img_size, **keywords) for member in members]
    return Ensemble(networks, img_size).eval()


def evaluation_view(network: Network, img_size: int | None = None) -> Transform:
    """Returns the transform from an image to the input of a network or of an ensemble."""
    return network.view if isinstance(network, Ensemble) else _transform(data_config(network, img_size))


def _transform(config: DataConfig) -> Transform:
    return evaluation_transform(config["input_size"][1:], config["mean"], config["std"])


def _side_by_side(transforms: Sequence[Transform], image: Pixels) -> Tensor:
    """The inputs of several networks for one image, flat and one after the other."""
    return torch.cat([transform(image).flatten() for transform in transforms])


def _order(network: Network, first: Network) -> list[int]:
    """Positions of a network's logits in the order of the first network's classes."""
    names, expected = label_names(network), label_names(first)
    if names is None or expected is None:
        if network.num_classes == first.num_classes:
            return list(range(network.num_classes))
    elif sorted(names) == sorted(expected):
        return [names.index(name) for name in expected]
    other = sorted({*(names or ())} ^ {*(expected or ())})[:8] or network.num_classes
    remedy = f"the members have other classes than the first one: {other}; average networks of the same classes"
    raise ArgumentError.of("classes", list(expected or ())[:8], remedy)
