"""The domains that a MoGE model discovered: for every place, the routed expert with the largest weight."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp
from ..layers.encoders.coverage import distances
from ..losses import discovered_domains
from ..networks.build import Network


class DomainMap(NamedTuple):
    """Discovered domains on a grid.

    Attributes:
        longitude: (W,) degrees, centers of the cells.
        latitude: (H,) degrees, centers of the cells, south to north.
        experts: (H, W) int64, the discovered domain of each cell; -1 where the shared expert alone answers.
        num_experts: E.
        distance: (H, W) km from each cell to the nearest training coordinate; None where the model keeps no index.
        radius: km, beyond which the model does not route; None where it routes everywhere.
    """

    longitude: Tensor
    latitude: Tensor
    experts: Tensor
    num_experts: int
    distance: Tensor | None = None
    radius: float | None = None


def geo_layers(model: nn.Module) -> list[GeoMoeMlp]:
    """The MoGE layers of a model in order.

    Raises:
        ArgumentError: It has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GeoMoeMlp)]
    if not layers:
        raise ArgumentError.of("model", type(model).__name__, "has no metadata-routed experts; give a MoGE model")
    return layers


def geo_blocks(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the transformer blocks that hold the MoGE layers, in order."""
    blocks = enumerate(getattr(model, "blocks", ()))
    return tuple(at for at, block in blocks if any(isinstance(part, GeoMoeMlp) for part in block.modules()))


@torch.no_grad()
def domains_at(model: Network, metadata: Tensor) -> Tensor:
    """The discovered domain of each place: argmax of the last layer's noiseless weights. No image is needed.

    Args:
        model: A MoGE model, not wrapped; it is left in its mode.
        metadata: (B, ...) as the model's encoder takes it, on any device.

    Returns:
        (B,) int64 on CPU; -1 for unknown places, and for those that the model's coverage leaves out.

    Raises:
        ArgumentError: The model has no MoGE layer.
        MetadataError: The encoder does not take the metadata.
    """
    router = geo_layers(model)[-1].router
    training = model.training
    model.eval()
    try:
        metadata = metadata.to(router.codes.device)
        context, present = model.metadata_encoder(router.codes.new_zeros(len(metadata), 1), metadata)
        return discovered_domains(router(context)._replace(routed=present)).cpu()
    finally:
        model.train(training)


def domain_map(model: Network, step: float = 2.0) -> DomainMap:
    """Discovered domains of the whole globe.

    Args:
        model: A MoGE model whose metadata are coordinates; further columns stand at their means.
        step: Width and height of a cell, degrees; 180 should be a multiple.

    Raises:
        ArgumentError: See `domains_at`, or a step that is not in 0..90.
        MetadataError: The model's metadata are no coordinates.
    """
    if not 0 < step <= 90:
        raise ArgumentError.of("step", step, "give a width in degrees, such as 2")
    longitude = torch.arange(-180 + step / 2, 180, step)
    latitude = torch.arange(-90 + step / 2, 90, step)
    rows, columns = torch.meshgrid(latitude, longitude, indexing="ij")
    means = [number.mean for number in getattr(model.metadata_encoder.encoder, "numbers", ())]
    places = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    metadata = torch.cat([places, torch.tensor(means).expand(len(places), -1)], dim=1)
    experts = domains_at(model, metadata).view(rows.shape)
    found = DomainMap(longitude, latitude, experts, geo_layers(model)[-1].experts.num_experts)
    coverage = model.metadata_encoder.coverage
    if coverage is None:
        return found
    distance = distances(coverage, places.to(coverage.points.device)).cpu().view(rows.shape)
    return found._replace(distance=distance, radius=coverage.radius)
