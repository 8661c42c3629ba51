"""What a model makes of metadata: the encoder by its name, and the index of the coordinates that it was trained on."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import MetadataError
from ..layers.encoders.coverage import Coverage, checked_radius, thin_coordinates
from ..layers.encoders.location import (
    LOCATION_ENCODERS,
    CoordinateEncoder,
    LocationEncoder,
    LocationIdEmbedding,
    SinCosEncoder,
)
from ..layers.encoders.metadata import ColumnsEncoder, MetadataEncoder, NoMetadata
from ..layers.encoders.satclip import load_satclip

SATCLIP_PREFIX = "satclip:"
_logger = logging.getLogger(__name__)


def build_metadata_encoder(
    encoder: str | nn.Module,
    num_locations: int,
    width: int | None,
    drop: float,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    columns: Mapping[str, Sequence[float]] | None = None,
) -> MetadataEncoder:
    """The encoder of a MoGE model, by name or as a module of the user's own, and of further columns if there are any.

    Raises:
        CheckpointError: See `load_satclip`.
        MetadataError: Unknown name, a module of unknown width, or columns beside what are no coordinates.
    """
    place = encoder
    if not isinstance(place, nn.Module):
        place = _encoder_by_name(place, num_locations, width or 256, drop, device, dtype)
    if columns:
        return MetadataEncoder(ColumnsEncoder(place, columns, device, dtype))
    return MetadataEncoder(place, width if place is encoder else None)


def index_coordinates(encoder: MetadataEncoder | NoMetadata, lonlat: Tensor) -> Coverage:
    """Gives an encoder an index of training coordinates, in place of one that it may have.

    Args:
        encoder: A model's.
        lonlat: (N, 2) longitude, latitude in degrees; rows with NaN are left out.

    Raises:
        MetadataError: The encoder does not read coordinates, or none is known.
    """
    if not isinstance(encoder, MetadataEncoder) or not isinstance(encoder.encoder, CoordinateEncoder):
        name = type(getattr(encoder, "encoder", encoder)).__name__
        raise MetadataError.of("metadata_encoder", name, "coverage needs an encoder of longitude and latitude")
    points, slack = thin_coordinates(lonlat)
    coverage = Coverage(len(points)).hold(points).to(next(encoder.parameters()).device)
    encoder.coverage = coverage
    counts = f"{len(points)} points stand for {len(lonlat)} training coordinates"
    _logger.info(f"coverage: {counts}, each within {slack:.0f} km")
    return coverage


def bound_coverage(encoder: MetadataEncoder | NoMetadata, radius: float | None, falls_back: bool) -> float | None:
    """Sets the radius of an encoder's index.

    Args:
        encoder: A model's.
        radius: km; None or infinity for no bound.
        falls_back: Whether the model has shared experts.

    Returns:
        The radius; None for no bound.

    Raises:
        MetadataError: A radius that cannot be, or one without an index or without shared experts.
    """
    radius = checked_radius(radius)
    coverage = encoder.coverage if isinstance(encoder, MetadataEncoder) else None
    if radius is not None and coverage is None:
        remedy = "the model has no index of training coordinates; finetune.py --coverage-radius makes one"
        raise MetadataError.of("coverage_radius", radius, remedy)
    if radius is not None and not falls_back:
        raise MetadataError.of("coverage_radius", radius, "shared_expert=False leaves no expert to fall back to")
    if coverage is not None:
        coverage.radius = radius
    return radius


def _encoder_by_name(
    encoder: str,
    num_locations: int,
    width: int,
    drop: float,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    if encoder.startswith(SATCLIP_PREFIX):
        return load_satclip(encoder.removeprefix(SATCLIP_PREFIX)).to(device, dtype)
    if encoder == "spherical_harmonics":
        return LocationEncoder(width, drop=drop, device=device, dtype=dtype)
    if encoder == "sincos":
        return SinCosEncoder(width, device=device, dtype=dtype)
    if encoder == "location_id":
        return LocationIdEmbedding(num_locations, width, device, dtype)
    remedy = f"choose one of {LOCATION_ENCODERS}, '{SATCLIP_PREFIX}FILE_OR_REPOSITORY', or give an nn.Module"
    raise MetadataError.of("metadata_encoder", encoder, remedy)
