"""Writes the scenes of docs/start/own_geotiffs.md: three continents from NASA's Blue Marble, and polygons of climates.

    python examples/earth/scenes.py FOLDER

FOLDER/CONTINENT.tif have the bands red, green and blue, with 15 pixels a degree. FOLDER/climates.geojson has the main
climates of Koeppen and Geiger, from a grid of half a degree. Needs `pip install -e ".[earth,geo]"`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import rasterio
import rasterio.features
from draw import climate_numbers
from rasterio.transform import from_bounds

from timm_moe_dg.data.readers.blue_marble import MAIN_CLIMATES, read_earth

# West, south, east, north in degrees
CONTINENTS = {"africa": (-18, -36, 52, 28), "europe": (-10, 36, 40, 68), "south_america": (-82, -56, -34, 12)}
CELL = 0.5  # degrees of a cell of the polygons


def write_scene(path: Path, bounds: tuple[int, int, int, int]) -> None:
    """Cuts a scene from the picture of the Earth. The sea is masked."""
    picture = read_earth()
    scale = picture.width / 360
    west, south, east, north = bounds
    left, top, right, bottom = (round(scale * edge) for edge in (west + 180, 90 - north, east + 180, 90 - south))
    bands = np.asarray(picture.crop((left, top, right, bottom))).transpose(2, 0, 1)
    _, height, width = bands.shape
    grid = {"crs": "EPSG:4326", "transform": from_bounds(*bounds, width, height)}
    land = main_climates(bounds, height, width) > 0
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", driver="GTiff", count=3, height=height, width=width, dtype="uint8", **grid) as file,
    ):
        file.write(bands)
        file.write_mask(land)
        file.descriptions = ("red", "green", "blue")


def main_climates(bounds: tuple[int, int, int, int], height: int, width: int) -> np.ndarray:
    """The main climate in each cell of a grid, uint8 (height, width): 1 to 5, and 0 in the sea."""
    west, south, east, north = bounds
    longitude = west + (np.arange(width) + 0.5) * (east - west) / width
    latitude = north - (np.arange(height) + 0.5) * (north - south) / height
    lonlat = np.stack(np.meshgrid(longitude, latitude), axis=-1).reshape(-1, 2)
    return climate_numbers(lonlat).reshape(height, width)


def climate_polygons() -> list[dict[str, object]]:
    """GeoJSON features of the main climates on land."""
    codes = main_climates((-180, -90, 180, 90), round(180 / CELL), round(360 / CELL))
    shapes = rasterio.features.shapes(codes, mask=codes > 0, transform=from_bounds(-180, -90, 180, 90, *codes.T.shape))
    labels = list(MAIN_CLIMATES.values())
    return [
        {"type": "Feature", "geometry": shape, "properties": {"label": labels[int(code) - 1]}} for shape, code in shapes
    ]


def main(folder: Path) -> None:
    """Writes scenes and polygons."""
    for name, bounds in CONTINENTS.items():
        write_scene(folder / f"{name}.tif", bounds)
    features = {"type": "FeatureCollection", "features": climate_polygons()}
    (folder / "climates.geojson").write_text(json.dumps(features))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
