"""Where a router has been trained: an index of the training coordinates, and the distance of a place to it.

A router that is asked about a place far from all that it has seen still answers, with whatever its encoder extrapolates
to. The index says where that begins, so that such images can go to the shared expert, as those without metadata do.
Axes: B places, P points of the index.
"""

import math
from typing import Final, NamedTuple, Optional, Self

import torch
from torch import Tensor, nn

from ...errors import MetadataError

EARTH_RADIUS = 6371.0088  # km, the mean radius of the International Union of Geodesy and Geophysics
MAX_POINTS = 4096
FINEST = 0.25  # degrees
_ROWS = 1024  # places at a time, against thousands of points
_UNITS = 1e6  # of a degree: 0.11 m


class Coverage(nn.Module):
    """Tells the places that lie near a training coordinate from those that do not.

    Points are kept as integers, millionths of a degree, which conversion to half precision leaves alone.

    Args:
        num_points: P; the points themselves come from `hold` or from a checkpoint.
        radius: Great-circle distance to the nearest point, km, up to which a place is covered; None covers everything.
        device: Where the points are made.

    Raises:
        MetadataError: A radius below 0 or not a number.
    """

    points: Tensor
    units: Final[float] = _UNITS  # TorchScript reads no globals
    earth_radius: Final[float] = EARTH_RADIUS

    def __init__(self, num_points: int, radius: float | None = None, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("points", torch.zeros(num_points, 2, dtype=torch.int32, device=device))
        self.radius: Optional[float] = checked_radius(radius)  # noqa: UP045 (TorchScript)

    @torch.jit.unused
    def hold(self, points: Tensor) -> Self:
        """Takes (P, 2) longitude, latitude in degrees as its points."""
        self.points.copy_((points * _UNITS).round())
        return self

    def distance(self, lonlat: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees -> (B,) float64 km to the nearest point; NaN where one of them is."""
        return self.earth_radius * torch.acos(self._cosine(lonlat))

    def _cosine(self, lonlat: Tensor) -> Tensor:
        """(B, 2) degrees -> (B,) cosine of the angle to the nearest point."""
        places, points = _unit_vectors(lonlat), _unit_vectors(self.points.double() / self.units)
        cosine = (places @ points.mT).amax(1)  # in float64, which resolves a meter where the cosine is near 1
        return cosine.clamp(-1.0, 1.0)

    def forward(self, lonlat: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees -> (B,) bool: within the radius of a point."""
        radius = self.radius
        if radius is None:
            return torch.ones(lonlat.shape[0], dtype=torch.bool, device=lonlat.device)
        # Not by the distance: onnxruntime has no arc cosine in float64
        return self._cosine(lonlat) >= math.cos(min(radius / self.earth_radius, math.pi))


def distances(coverage: Coverage, lonlat: Tensor) -> Tensor:
    """`Coverage.distance` of any number of places, some at a time."""
    return torch.cat([coverage.distance(part) for part in lonlat.split(_ROWS)])


class Thinned(NamedTuple):
    """Few points that stand for many coordinates.

    Attributes:
        points: (P, 2) float64 longitude, latitude in degrees.
        slack: km, within which of a point every coordinate lies.
    """

    points: Tensor
    slack: float


def thin_coordinates(lonlat: Tensor, max_points: int = MAX_POINTS) -> Thinned:
    """Thins coordinates to the centers of the cells of a grid that they lie in, so that none is given away exactly.

    Cells are `FINEST` degrees high; they are doubled until there are few enough.

    Args:
        lonlat: (N, 2) longitude, latitude in degrees; rows with NaN are left out.
        max_points: Bound of P, 2 or more.

    Raises:
        MetadataError: No coordinate is known.
    """
    known = lonlat.double()[~lonlat.isnan().any(dim=-1)]
    if not len(known):
        raise MetadataError.of("coordinates", tuple(lonlat.shape), "none is known; give longitudes and latitudes")
    size = FINEST
    while len(points := cell_centers(known, size)) > max_points:
        size *= 2.0
    return Thinned(points, slack(size))


def cell_centers(lonlat: Tensor, size: float) -> Tensor:
    """Centers of the occupied cells: bands of latitude, cut into as many cells as keep them no wider than high.

    Args:
        lonlat: (N, 2) degrees, without NaN.
        size: Height of a band at most, degrees; 180 is a multiple of the height.

    Returns:
        (P, 2) float64 degrees, sorted.
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


def slack(size: float) -> float:
    """Largest distance of a coordinate to its cell's center, km.

    The haversine of it is at most sin^2(size / 4), from the difference of latitudes, plus (size / 4)^2, from that of
    longitudes, since a cell is nowhere wider than high.

    Args:
        size: Height of a cell, degrees.
    """
    quarter = math.radians(size) / 4.0
    return 2.0 * EARTH_RADIUS * math.asin(math.sqrt(min(1.0, math.sin(quarter) ** 2 + quarter**2)))


def checked_radius(radius: float | None) -> float | None:
    """Returns a radius in km as it is kept: None, for no bound, where it is infinite.

    Raises:
        MetadataError: It is below 0 or not a number.
    """
    if radius is not None and not radius >= 0.0:
        raise MetadataError.of("coverage_radius", radius, "give a distance of 0 km or more; inf covers everything")
    return None if radius is None or math.isinf(radius) else float(radius)


def _unit_vectors(lonlat: Tensor) -> Tensor:
    """(B, 2) degrees -> (B, 3) float64."""
    longitude, latitude = torch.deg2rad(lonlat.double()).unbind(1)
    wide = latitude.cos()
    return torch.stack([wide * longitude.cos(), wide * longitude.sin(), latitude.sin()], dim=1)
