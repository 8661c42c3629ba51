"""Where a group's name goes on a map: beside its images, not on them, and not on another name."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GAP = 2.0  # degrees
DEGREES = 0.88  # of longitude or latitude that a point of type takes on a map 6.4 inches wide
_LETTER = 0.56  # mean width over size


class Box(NamedTuple):
    """A rectangle on the map, degrees."""

    west: float
    south: float
    east: float
    north: float

    @property
    def center(self) -> tuple[float, float]:
        """Longitude and latitude of its middle."""
        return (self.west + self.east) / 2, (self.south + self.north) / 2

    def overlap(self, other: "Box") -> float:
        """Area of what both cover, square degrees."""
        width = min(self.east, other.east) - max(self.west, other.west)
        height = min(self.north, other.north) - max(self.south, other.south)
        return max(0.0, width) * max(0.0, height)


WORLD = Box(-180.0, -90.0, 180.0, 90.0)


def extent(lonlat: np.ndarray, margin: float = 0.0) -> Box:
    """The rectangle that holds a group but for its outermost images; on one side of the date line.

    Args:
        lonlat: (N, 2) degrees, N > 0.
        margin: Degrees to add on each side.
    """
    angles = np.radians(lonlat[:, 0].astype(float))
    middle = float(np.degrees(np.arctan2(np.sin(angles).mean(), np.cos(angles).mean())))
    away = (lonlat[:, 0] - middle + 180.0) % 360.0 - 180.0
    (west, east), (south, north) = (np.percentile(values, (2, 98)) for values in (away, lonlat[:, 1]))
    west, east = max(middle + west - margin, -180.0), min(middle + east + margin, 180.0)
    return Box(west, float(south) - margin, east, float(north) + margin)


def beside(group: Box, name: str, taken: Sequence[Box], size: float) -> Box:
    """Finds the place of a name: below its group, above, at the right or at the left, where it covers least.

    Args:
        group: Where its images are.
        name: The text, one line.
        taken: What it should not cover.
        size: Of the type, points.
    """
    wide, high = _LETTER * size * DEGREES * len(name), 1.2 * size * DEGREES
    across, up = group.center
    centers = [
        (across, group.south - GAP - high / 2),
        (across, group.north + GAP + high / 2),
        (group.east + GAP + wide / 2, up),
        (group.west - GAP - wide / 2, up),
    ]
    boxes = [Box(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2) for x, y in centers]
    # Rounded, so that of equals the first is taken
    return min(boxes, key=lambda box: round(sum(map(box.overlap, taken)) + wide * high - box.overlap(WORLD), 3))
