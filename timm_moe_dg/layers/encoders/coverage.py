"""The coverage of the training coordinates: an index of points, and the distance of places to the nearest one.

Axes: B places, P points of the index.
"""

import math
from typing import Self

import torch
from torch import Tensor, nn

from ...errors import MetadataError

EARTH_RADIUS = 6371.0088  # km, the mean radius of the International Union of Geodesy and Geophysics
MAX_POINTS = 4096
FINEST = 0.25  # smallest height of a grid cell, degrees
CELL_RADIUS = math.radians(FINEST) / math.sqrt(2) * EARTH_RADIUS  # from the center of the smallest cell to a corner, km
_ROWS = 1024  # places whose distances to all points are computed at once
_UNITS = 1e6  # per degree: 0.11 m


class Coverage(nn.Module):
    """Whether places are within a radius of the training coordinates, far from which a router extrapolates.

    Args:
        num_points: P; the points are set by `hold` or loaded from a checkpoint.
        radius: Largest great-circle distance to the nearest point, km; None covers everything.
    """

    points: Tensor

    def __init__(self, num_points: int, radius: float | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        # Millionths of a degree as integers, which module.half() does not round
        self.register_buffer("points", torch.zeros(num_points, 2, dtype=torch.int32, device=device))
        self.radius = radius

    def hold(self, points: Tensor) -> Self:
        """Sets the points to (P, 2) longitude, latitude in degrees."""
        self.points.copy_((points * _UNITS).round())
        return self

    @property
    def degrees(self) -> Tensor:
        """(P, 2) longitude, latitude of the points in degrees, float64."""
        return self.points.double() / _UNITS

    def distance(self, lonlat: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees -> (B,) float64 km to the nearest point; NaN stays."""
        return EARTH_RADIUS * torch.acos(self._cosine(lonlat))

    def nearest(self, lonlat: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees, without NaN -> (B,) int64 position of the nearest point."""
        points = _unit_vectors(self.degrees)
        return (_unit_vectors(lonlat) @ points.mT).argmax(1)

    def _cosine(self, lonlat: Tensor) -> Tensor:
        """(B, 2) degrees -> (B,) cosine of the angle to the nearest point."""
        places, points = _unit_vectors(lonlat), _unit_vectors(self.degrees)
        cosine = (places @ points.mT).amax(1)  # float64 resolves a meter where the cosine is near 1
        return cosine.clamp(-1.0, 1.0)

    def forward(self, lonlat: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees -> (B,) bool: within the radius of a point."""
        if self.radius is None:
            return torch.ones(lonlat.shape[0], dtype=torch.bool, device=lonlat.device)
        # Cosines are compared, since onnxruntime has no arc cosine in float64
        return self._cosine(lonlat) >= math.cos(min(self.radius / EARTH_RADIUS, math.pi))


def distances(coverage: Coverage, lonlat: Tensor) -> Tensor:
    """`Coverage.distance` for any number of places, computed in parts."""
    return torch.cat([coverage.distance(part) for part in lonlat.split(_ROWS)])


def thin_coordinates(lonlat: Tensor, max_points: int = MAX_POINTS) -> Tensor:
    """Replaces coordinates by the centers of their cells on a grid, so that a model reveals no exact coordinate.

    (N, 2) longitudes and latitudes in degrees give float64 (P, 2), P <= `max_points`. Rows with NaN are left out, and
    at least one row must remain. `max_points` is 2 or more.
    """
    coordinates = lonlat.double()[~lonlat.isnan().any(dim=-1)]
    if not len(coordinates):
        raise MetadataError.of("coordinates", tuple(lonlat.shape), "all are NaN; give longitudes and latitudes")
    size = FINEST
    while len(points := cell_centers(coordinates, size)) > max_points:
        size *= 2.0  # larger cells until there are few enough
    return points


def cell_centers(lonlat: Tensor, size: float) -> Tensor:
    """(N, 2) degrees without NaN -> (P, 2) float64 degrees, sorted: the centers of a grid's occupied cells.

    The bands of latitude are at most `size` degrees high, and their height divides 180. Their cells are no wider than
    high.
    """
    bands = math.ceil(180.0 / size)
    height = 180.0 / bands
    band = ((lonlat[:, 1] + 90.0) / height).floor().clamp(0, bands - 1)
    south = band * height - 90.0
    widest = torch.zeros_like(south).clamp(south, south + height)  # the latitude nearest to the equator
    across = (torch.deg2rad(widest).cos() * 360.0 / height).ceil().clamp(min=1.0)
    column = ((lonlat[:, 0] + 180.0) / 360.0 * across).floor().remainder(across)
    cells = torch.stack([(column + 0.5) * 360.0 / across - 180.0, south + height / 2.0], dim=1)
    return cells.unique(dim=0)


def _unit_vectors(lonlat: Tensor) -> Tensor:
    """(B, 2) degrees -> (B, 3) float64."""
    longitude, latitude = torch.deg2rad(lonlat.double()).unbind(1)
    horizontal = latitude.cos()
    return torch.stack([horizontal * longitude.cos(), horizontal * longitude.sin(), latitude.sin()], dim=1)
