"""The index of training coordinates that a MoGE model keeps, and the radius within which it routes."""

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
from ..models import DomainHeadsVisionTransformer
from ..models._geo_vit import GeoMoeVisionTransformer
from ..networks.trained import takes_metadata
from .plan import RunPlan


def cover_training_coordinates(network: nn.Module, plan: RunPlan) -> None:
    """Sets the coverage of a network that reads coordinates: those of its training images, and the run's radius.

    The radius "auto" is the smallest one that does not change training-domain validation: the distance of its farthest
    image to the index. Up to there the router has been validated. Neither labels nor held-out domains are needed.
    """
    if isinstance(network, DomainHeadsVisionTransformer) and takes_metadata(network, plan.domains):
        inside = [split.inside for split in plan.splits]
        network.set_domains([coordinates(plan.domains, [domain], inside) for domain in plan.training])
    radius = plan.options.coverage_radius
    indexed = reads_coordinates(network) and takes_metadata(network, plan.domains)
    if radius is not None and not (indexed and getattr(network, "expert_mode", None) == "routed"):
        remedy = f"{plan.options.model} does not route by coordinates here; leave it out"
        raise ArgumentError.of("coverage_radius", radius, remedy)
    if not reads_coordinates(network) or not indexed:
        return
    coverage = network.set_coverage(coordinates(plan.domains, plan.training, [split.inside for split in plan.splits]))
    if isinstance(radius, str):  # "auto"
        validation = coordinates(plan.domains, plan.training, [split.outside for split in plan.splits])
        # Validation accuracy could not choose the radius: a region that is missing in the index has been trained on
        radius = validated_radius(distances(coverage, validation))
    network.set_coverage_radius(radius)


def reads_coordinates(network: nn.Module) -> TypeGuard[GeoMoeVisionTransformer]:
    """Whether a network is a MoGE model whose metadata are longitude and latitude."""
    if not isinstance(network, GeoMoeVisionTransformer):
        return False
    encoder = network.metadata_encoder
    return isinstance(encoder, MetadataEncoder) and isinstance(encoder.encoder, CoordinateEncoder)


def coordinates(domains: Sequence[Domain], chosen: Sequence[int], positions: Sequence[np.ndarray]) -> Tensor:
    """Returns longitude and latitude in degrees, (N, 2), of the images at `positions` in the chosen domains."""
    rows = [np.asarray(domains[domain].metadata)[positions[domain]] for domain in chosen]
    return torch.from_numpy(np.concatenate(rows))


def validated_radius(distance: Tensor) -> float:
    """Returns the largest distance in km, rounded up. NaN stands for an image without coordinates."""
    valid = distance[~distance.isnan()]
    if not len(valid):
        raise ArgumentError.of("coverage_radius", "auto", "no validation image has coordinates; give a distance in km")
    return float(valid.max().ceil())
