"""What a MoGE model's experts do: discovered domains, and the accuracy of each expert on each domain.

The discovered domain of a place is the routed expert with the largest weight there. The model is not wrapped.
Axes: E routed experts, B images or places.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp
from ..layers.encoders.coverage import distances
from ..layers.reports import discovered_domains
from ..metrics import group_accuracy
from ..networks.build import Network
from .run_view import evaluation_mode

Batches = Iterable[Sequence[Tensor]]  # images (B, 3, H, W), targets, groups and metadata (B, ...)


class Extent(NamedTuple):
    """A part of the globe, in degrees."""

    west: float
    east: float
    south: float
    north: float


class DomainMap(NamedTuple):
    """Discovered domains on a grid of equal cells."""

    extent: Extent
    experts: Tensor  # (H, W) int64 from the south-west, the discovered domain; -1 where the model does not route
    num_experts: int  # E
    distance: Tensor | None = None  # (H, W) km to the nearest training coordinate; None if not stored
    radius: float | None = None  # km, beyond which the model does not route; None if it routes everywhere


class ExpertMatrix(NamedTuple):
    """Accuracy by discovered domain of the sample and by forced expert (MoGE, Figure 3)."""

    accuracy: Tensor  # (E, E) rows are domains, columns forced experts; NaN in the row of a domain without samples
    num_samples: Tensor  # (E,) by domain
    routed: Tensor  # (E,) accuracy of each domain with ordinary routing


def geo_layers(model: nn.Module) -> list[GeoMoeMlp]:
    """The MoGE layers of a model in order. Raises ArgumentError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, GeoMoeMlp)]
    if not layers:
        raise ArgumentError.of("model", type(model).__name__, "has no metadata-routed experts; give a MoGE model")
    return layers


def domains_at(model: Network, metadata: Tensor) -> Tensor:
    """The discovered domain of each place: argmax of the last layer's noiseless weights. No image is needed.

    (B, ...) metadata, as the model's encoder takes them, on any device -> (B,) int64 on CPU; -1 for unknown places and
    for places outside the model's coverage radius.
    """
    layers = geo_layers(model)
    with evaluation_mode(model):
        # Of the images, the encoder uses the batch size alone
        codes = layers[-1].router.codes
        context, is_routed = model.metadata_encoder(codes.new_zeros(len(metadata), 1), metadata.to(codes.device))
        return discovered_domains(layers[-1].router(context)._replace(routed=is_routed)).cpu()


WORLD = Extent(-180.0, 180.0, -90.0, 90.0)
KM_PER_DEGREE = 111.2
_COLUMNS, _MOST_COLUMNS = 180, 360  # cells across a map, in general and at most


def map_extent(places: Sequence[Tensor], radius: float | None = None) -> Extent:
    """Returns the part of the globe that shows all places, (N, 2) degrees each, and a margin: a tenth, or `radius` km.

    It is a degree wide or more, and as high as a half to the whole of its width. Places on both sides of the date line
    have the whole globe.
    """
    rows = torch.cat([part.double() for part in places])
    rows = rows[~rows.isnan().any(dim=1)]
    if not len(rows):
        return WORLD
    low, high = rows.amin(0), rows.amax(0)
    span = high - low
    span = torch.maximum(span * 1.2, span + min(2.2 * (radius or 0.0) / KM_PER_DEGREE, 20.0))
    width = max(float(span[0]), float(span[1]), 1.0)
    height = min(max(float(span[1]), width / 2), 180.0)
    if width > 180.0:
        return WORLD
    west, south = (low + high)[0].item() / 2 - width / 2, (low + high)[1].item() / 2 - height / 2
    west, south = min(max(west, -180.0), 180.0 - width), min(max(south, -90.0), 90.0 - height)
    return Extent(west, west + width, south, south + height)


def cell_width(extent: Extent, radius: float | None) -> float:
    """Returns the width of a map's cells in degrees, at most two thirds of a coverage radius in km.

    Wider cells would miss the places that the model routes. There are 180 to 360 cells across the map.
    """
    across = extent.east - extent.west
    widest = math.inf if radius is None else radius / KM_PER_DEGREE / 1.5
    return max(min(across / _COLUMNS, widest), across / _MOST_COLUMNS)


def domain_map(model: Network, extent: Extent, step: float) -> DomainMap:
    """A part of the globe in cells of at most `step` degrees. Further metadata are at their training means."""
    longitude, latitude = _centers(extent.west, extent.east, step), _centers(extent.south, extent.north, step)
    rows, columns = torch.meshgrid(latitude, longitude, indexing="ij")
    means = [number.mean for number in getattr(model.metadata_encoder.encoder, "numbers", ())]
    places = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    metadata = torch.cat([places, torch.tensor(means).expand(len(places), -1)], dim=1)
    experts = domains_at(model, metadata).view(rows.shape)
    domains = DomainMap(extent, experts, geo_layers(model)[-1].experts.num_experts)
    coverage = model.metadata_encoder.coverage
    if coverage is None:
        return domains
    distance = distances(coverage, places.to(coverage.points.device)).cpu().view(rows.shape)
    return domains._replace(distance=distance, radius=coverage.radius)


def _centers(low: float, high: float, step: float) -> Tensor:
    """Centers of equal cells, of at most `step` degrees, from `low` to `high`."""
    number = math.ceil((high - low) / step - 1e-9)
    return low + (torch.arange(number) + 0.5) * ((high - low) / number)


def forced_expert_matrix(model: Network, batches: Batches) -> ExpertMatrix:
    """Measures every expert on the samples of every discovered domain, from batches on the model's device.

    The expert mode is "routed" afterwards. Samples without metadata have no domain and are left out.
    """
    num_experts = geo_layers(model)[-1].experts.num_experts
    modes: tuple[str | int, ...] = ("routed", *range(num_experts))
    domains, targets, predictions = [], [], []
    try:
        with evaluation_mode(model):
            for images, target, _, metadata in batches:
                by_mode = []
                for mode in modes:
                    model.set_expert_mode(mode)
                    by_mode.append(model(images, metadata).argmax(1).cpu())
                predictions.append(torch.stack(by_mode))
                domains.append(domains_at(model, metadata))
                targets.append(target.cpu())
    finally:
        model.set_expert_mode("routed")
    domain, target, predicted = torch.cat(domains), torch.cat(targets), torch.cat(predictions, dim=1)
    has_domain = domain >= 0
    columns = [
        group_accuracy(row[has_domain], target[has_domain], domain[has_domain], num_experts) for row in predicted
    ]
    accuracy = torch.stack([column.accuracy for column in columns], dim=1)
    return ExpertMatrix(accuracy[:, 1:], columns[0].num_samples, accuracy[:, 0])
