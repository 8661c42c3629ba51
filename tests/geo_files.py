"""A small georeferenced scene: two classes in halves, which differ in their first band."""

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.transform import from_origin

ORIGIN, PIXEL = (400_000, 5_600_000), 10  # meters in UTM zone 31 north
NAMES = ("B02", "B03", "B04", "B08", "B8A")


def write_scene(path: Path, values: np.ndarray, **more: Any) -> Path:
    """Writes (bands, height, width) values as a GeoTIFF with the names of Sentinel-2's bands."""
    options = {"crs": "EPSG:32631", "transform": from_origin(*ORIGIN, PIXEL, PIXEL), "tiled": True, **more}
    options |= {"count": len(values), "height": values.shape[1], "width": values.shape[2], "dtype": values.dtype}
    options |= {"blockxsize": 16, "blockysize": 16}
    with rasterio.open(path, "w", driver="GTiff", **options) as file:
        file.write(values)
        if len(values) == len(NAMES):
            file.descriptions = NAMES
    return path


def halves(height: int = 96, width: int = 128) -> np.ndarray:
    """Values of five bands: the left half is bright in the first band, and the right half in the second."""
    values = np.random.default_rng(0).integers(1, 20_000, (5, height, width), dtype=np.uint16)
    values[0, :, : width // 2] += 30_000
    values[1, :, width // 2 :] += 30_000
    return values
