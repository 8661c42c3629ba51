"""Which expert each patch of an image goes to first, and how undecided the router is about it.

Sparse Mixture-of-Experts are Domain Generalizable Learners (Li et al., ICLR 2023), figures 3 and 8 to 17. Axes: B
images, H x W patches, E experts.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ...layers import GeoMoeMlp, RoutedMlp
from ...layers.router import RouterOutput
from ...networks.build import Network


class RoutingMap(NamedTuple):
    """What the router of one mixture block decided. A MoGE model routes whole images: H = W = 1.

    Attributes:
        first: (B, H, W) int64, the expert with the largest weight; -1 where only the shared expert answers.
        entropy: (B, H, W) of the noiseless routing probabilities, in nats: 0 to log(E).
        num_experts: E.
    """

    first: Tensor
    entropy: Tensor
    num_experts: int


def mixture_blocks(model: Network) -> dict[int, RoutedMlp]:
    """The mixture layers of a vision transformer by the index of their block.

    Raises:
        ArgumentError: It has none.
    """
    blocks = {index: block.mlp for index, block in enumerate(getattr(model, "blocks", ())) if is_mixture(block)}
    if not blocks:
        remedy = "is a dense model, without experts to look at; give a mixture, such as gmoe_small_patch16"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    return blocks


def is_mixture(block: nn.Module) -> bool:
    """Whether a block's feed-forward is a mixture of experts."""
    return isinstance(getattr(block, "mlp", None), RoutedMlp)


def routes_patches(model: Network) -> bool:
    """Whether a mixture model routes patches one by one, rather than whole images by their metadata.

    Raises:
        ArgumentError: It is no mixture.
    """
    return not any(isinstance(layer, GeoMoeMlp) for layer in mixture_blocks(model).values())


@contextmanager
def recording(layers: Iterable[RoutedMlp]) -> Iterator[None]:
    """Lets mixture layers keep what they decide, for a while."""
    kept = [(layer, layer.record_routing) for layer in layers]
    try:
        for layer, _ in kept:
            layer.record_routing = True
        yield
    finally:
        for layer, before in kept:
            layer.record_routing, layer.routing = before, None


@torch.no_grad()
def routing_maps(model: Network, images: Tensor, metadata: Tensor | None = None) -> dict[int, RoutingMap]:
    """Routes a batch of images and returns what every mixture block decided, on CPU.

    Args:
        model: A vision transformer of this package, not wrapped; it is left in its mode.
        images: (B, 3, height, width), normalized.
        metadata: (B, ...) for models that route by it.

    Raises:
        ArgumentError: The model has no experts.
        MetadataError: Its encoder does not take the metadata.
    """
    layers, training = mixture_blocks(model), model.training
    model.eval()
    try:
        with recording(layers.values()):
            model(images) if metadata is None else model(images, metadata)
            return {index: _map(model, layer, images) for index, layer in layers.items()}
    finally:
        model.train(training)


def routing_maps_of(model: Network, batches: Iterable[tuple[Tensor, ...]]) -> dict[int, RoutingMap]:
    """`routing_maps` of many images: batches of (images,) or (images, metadata), put together."""
    parts = [routing_maps(model, *batch) for batch in batches]
    return {index: _joined([part[index] for part in parts]) for index in parts[0]}


def chosen_block(maps: Mapping[int, object], block: int | None) -> int:
    """The mixture block that was asked for, or the last one.

    Raises:
        ArgumentError: That block is dense, or does not exist.
    """
    if block is not None and block not in maps:
        raise ArgumentError.of("block", block, f"holds no experts; choose from {', '.join(map(str, maps))}")
    return max(maps) if block is None else block


def _map(model: Network, layer: RoutedMlp, images: Tensor) -> RoutingMap:
    routing: Any = layer.routing
    first, entropy = routing.expert_indices[:, 0], torch.special.entr(routing.probabilities).sum(-1)
    if isinstance(layer, GeoMoeMlp):
        shape: tuple[int, ...] = (len(images), 1, 1)
        first = _known(layer, routing)
        entropy = entropy.masked_fill(first < 0, 0.0)
    else:
        grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
        shape = (len(images), *grid)
        prefix = model.num_prefix_tokens
        first, entropy = (values.view(len(images), -1)[:, prefix:] for values in (first, entropy))
    return RoutingMap(first.reshape(shape).cpu(), entropy.reshape(shape).float().cpu(), layer.experts.num_experts)


def _known(layer: GeoMoeMlp, routing: RouterOutput) -> Tensor:
    """The expert that answers for each image: none without metadata, and the forced one where one is forced."""
    first = routing.expert_indices[:, 0]
    if layer.forced_expert is not None:
        first = torch.full_like(first, layer.forced_expert)
    return first if routing.routed is None else first.masked_fill(~routing.routed, -1)


def _joined(parts: list[RoutingMap]) -> RoutingMap:
    first, entropy = (torch.cat(values) for values in ([part.first for part in parts], [p.entropy for p in parts]))
    return RoutingMap(first, entropy, parts[0].num_experts)
