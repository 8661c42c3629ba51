"""What a MoGE model is told about the coordinates that it is trained on, and how far from them it routes."""

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Domain
from ..errors import ArgumentError
from ..layers import MetadataEncoder
from ..layers.encoders.coverage import distances
from ..layers.encoders.location import CoordinateEncoder
from ..models._geo_vit import GeoMoeVisionTransformer
from ..networks.trained import takes_metadata
from .plan import RunPlan


def cover_training_coordinates(network: nn.Module, plan: RunPlan) -> None:
    """Gives a network that reads coordinates an index of those of its training images, and the run's radius.

    "auto" is the smallest radius that leaves every answer of training-domain validation as it is: the distance to the
    index of the farthest image there. That far the router has been validated, farther out it has not. This needs
    neither labels nor any image of a held-out domain. Accuracy cannot choose the radius: a region that is left out of
    the index alone has still been trained on, and the router knows it.

    Args:
        network: In the expert mode of the run.
        plan: Of the run.

    Raises:
        ArgumentError: A radius was given, and the network does not route by coordinates on this data.
    """
    radius = plan.options.coverage_radius
    indexed = reads_coordinates(network) and takes_metadata(network, plan.domains)
    if radius is not None and not (indexed and getattr(network, "expert_mode", None) == "routed"):
        remedy = f"{plan.options.model} does not route by coordinates here; leave it out"
        raise ArgumentError.of("coverage_radius", radius, remedy)
    if not reads_coordinates(network) or not indexed:
        return
    coverage = network.set_coverage(coordinates(plan.domains, plan.training, [split.inside for split in plan.splits]))
    if radius == "auto":
        validation = coordinates(plan.domains, plan.training, [split.outside for split in plan.splits])
        radius = validated_radius(distances(coverage, validation))
    network.set_coverage_radius(radius)


def reads_coordinates(network: nn.Module) -> TypeGuard[GeoMoeVisionTransformer]:
    """Whether a network is a MoGE model whose metadata are longitude and latitude."""
    if not isinstance(network, GeoMoeVisionTransformer):
        return False
    encoder = network.metadata_encoder
    return isinstance(encoder, MetadataEncoder) and isinstance(encoder.encoder, CoordinateEncoder)


def coordinates(domains: Sequence[Domain], chosen: Sequence[int], positions: Sequence[np.ndarray]) -> Tensor:
    """Metadata of some images of some domains.

    Args:
        domains: All of them, with metadata.
        chosen: Which domains.
        positions: Which images, of every domain.

    Returns:
        (N, 2) longitude, latitude in degrees.
    """
    rows = [np.asarray(domains[at].metadata)[positions[at]] for at in chosen]
    return torch.from_numpy(np.concatenate(rows))


def validated_radius(distance: Tensor) -> float:
    """The distance, in whole km, within which all of some images lie.

    Args:
        distance: (N,) km of each image to the index; NaN where an image has no coordinates.

    Raises:
        ArgumentError: No image has coordinates.
    """
    known = distance[~distance.isnan()]
    if not len(known):
        raise ArgumentError.of("coverage_radius", "auto", "no validation image has coordinates; give a distance in km")
    return float(known.max().ceil())
