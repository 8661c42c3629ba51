"""A small georeferenced scene of two classes in halves, which differ in their first band, labels, and its tiles."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import rasterio.warp
from rasterio.transform import from_origin

from tests.load_tool import read_rows, run_tool

ORIGIN, PIXEL = (400_000, 5_600_000), 10  # meters in UTM zone 31 north
NAMES = ("B02", "B03", "B04", "B08", "B8A")
FACTS = {"descriptions", "scales", "offsets", "colorinterp"}  # of the bands of a rasterio dataset


def write_scene(path: Path, values: np.ndarray, **more: Any) -> Path:
    """Writes (bands, height, width) values as a GeoTIFF with the names of Sentinel-2's bands."""
    options = {"crs": "EPSG:32631", "transform": from_origin(*ORIGIN, PIXEL, PIXEL), "tiled": True, **more}
    options |= {"blockxsize": 16, "blockysize": 16}
    options |= {"descriptions": NAMES} if len(values) == len(NAMES) else {}
    return write_raster(path, values, **options)


def write_raster(path: Path, values: np.ndarray, **options: Any) -> Path:
    """Writes (bands, height, width) values as a GeoTIFF. Options are GDAL's, or what is known of each band."""
    facts = {name: options.pop(name) for name in options.keys() & FACTS}
    options |= {"count": len(values), "height": values.shape[1], "width": values.shape[2], "dtype": values.dtype}
    with rasterio.open(path, "w", driver="GTiff", **options) as file:
        file.write(values)
        for name, of_bands in facts.items():
            setattr(file, name, of_bands)
    return path


def halves(height: int = 96, width: int = 128) -> np.ndarray:
    """Values of five bands: the left half is bright in the first band, and the right half in the second."""
    values = np.random.default_rng(0).integers(1, 20_000, (5, height, width), dtype=np.uint16)
    values[0, :, : width // 2] += 30_000
    values[1, :, width // 2 :] += 30_000
    return values


def polygon(left: float, top: float, right: float, bottom: float, crs: str = "EPSG:32631") -> dict[str, Any]:
    """A rectangle in pixels of the scene, as GeoJSON in degrees or another system."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    ring = [(ORIGIN[0] + PIXEL * x, ORIGIN[1] - PIXEL * y) for x, y in corners]
    return rasterio.warp.transform_geom("EPSG:32631", crs, {"type": "Polygon", "coordinates": [ring]})


def write_features(path: Path, shapes: Iterable[tuple[str, Any]], crs: str = "EPSG:4326") -> Path:
    """Writes labels and geometries as GeoJSON."""
    features = [{"type": "Feature", "geometry": shape, "properties": {"label": name}} for name, shape in shapes]
    table: dict[str, Any] = {"type": "FeatureCollection", "features": features}
    if crs != "EPSG:4326":
        table["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:{crs.replace(':', '::')}"}}
    path.write_text(json.dumps(table))
    return path


def write_labels(path: Path, shapes: Iterable[tuple[str, tuple[int, int, int, int]]], crs: str = "EPSG:4326") -> Path:
    """Writes labels and rectangles (left, top, right, bottom) in pixels of the scene as GeoJSON."""
    return write_features(path, [(name, polygon(*shape, crs)) for name, shape in shapes], crs)


def tiles(scene: Path, labels: Path, output: Path, *words: str) -> list[dict[str, str]]:
    """Cuts tiles of 16 pixels, and returns the rows of their table."""
    run_tool("tiles", scene, labels, "--size", 16, "--block", 2, "--output", output, *words)
    return read_rows(output / "metadata.csv")
