"""The first expert of each patch, and the entropy of its routing (GMoE, Li et al., ICLR 2023, figures 3 and 8 to 17).

Axes: B images, H x W patches, E experts.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...layers import GeoMoeMlp, RoutedMlp
from ...losses import record_routing
from ...networks.build import Network
from ..run_view import evaluation_mode


class RoutingMap(NamedTuple):
    """The routing of one mixture block. A MoGE model routes whole images: H = W = 1."""

    first: Tensor  # (B, H, W) int64, the expert with the largest weight; -1 if only the shared expert is used
    entropy: Tensor  # (B, H, W) of the noiseless routing probabilities, in nats: 0 to log(E)
    num_experts: int


def mixture_blocks(model: Network) -> dict[int, RoutedMlp]:
    """The mixture layers of a vision transformer, by block. Raises ArgumentError if there are none."""
    mlps = {index: getattr(block, "mlp", None) for index, block in enumerate(getattr(model, "blocks", ()))}
    blocks = {index: mlp for index, mlp in mlps.items() if isinstance(mlp, RoutedMlp)}
    if not blocks:
        remedy = "is a dense model without experts; give a mixture, such as gmoe_small_patch16"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    return blocks


def routing_maps(model: Network, images: Tensor, metadata: Tensor | None = None) -> dict[int, RoutingMap]:
    """Routes images (B, 3, height, width) through an unwrapped model: each mixture block's routing, on CPU."""
    layers = mixture_blocks(model)
    with evaluation_mode(model), record_routing(model):
        model(images) if metadata is None else model(images, metadata)
        return {index: _map(model, layer, images) for index, layer in layers.items()}


def routing_maps_of(model: Network, batches: Iterable[tuple[Tensor, ...]]) -> dict[int, RoutingMap]:
    """Concatenates `routing_maps` of batches of (images,) or (images, metadata)."""
    parts = [routing_maps(model, *batch) for batch in batches]
    return {
        index: routing._replace(
            first=torch.cat([part[index].first for part in parts]),
            entropy=torch.cat([part[index].entropy for part in parts]),
        )
        for index, routing in parts[0].items()
    }


def chosen_block(maps: Mapping[int, object], block: int | None) -> int:
    """The index of a mixture block; None stands for the last one."""
    if block is not None and block not in maps:
        raise ArgumentError.of("block", block, f"holds no experts; choose from {', '.join(map(str, maps))}")
    return max(maps) if block is None else block


def _map(model: Network, layer: RoutedMlp, images: Tensor) -> RoutingMap:
    routing = layer.routing
    assert routing is not None, "nothing was recorded"
    first, entropy = routing.expert_indices[:, 0], torch.special.entr(routing.probabilities).sum(-1)
    if isinstance(layer, GeoMoeMlp):
        shape: tuple[int, ...] = (len(images), 1, 1)
        first = first if layer.forced_expert is None else torch.full_like(first, layer.forced_expert)
        first = first if routing.routed is None else first.masked_fill(~routing.routed, -1)  # images without metadata
        entropy = entropy.masked_fill(first < 0, 0.0)
    else:
        grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
        shape = (len(images), *grid)
        prefix = model.num_prefix_tokens  # class and distillation tokens are routed, too
        first, entropy = (values.view(len(images), -1)[:, prefix:] for values in (first, entropy))
    return RoutingMap(first.reshape(shape).cpu(), entropy.reshape(shape).float().cpu(), layer.experts.num_experts)
