"""Coordinates from GeoTIFFs: the center in degrees, from any reference system, where the table has none."""

import csv

import numpy as np
import pytest
from PIL import Image

from tests.geo_files import write_scene
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.rasters import places_of
from timm_moe_dg.data.readers.csv_tables import Metadata
from timm_moe_dg.errors import DataError, MissingDependencyError

rasterio = pytest.importorskip("rasterio")

VALUES = np.ones((5, 20, 30), np.uint16)
# Tiles of 30 x 20 pixels, whose center is 9 degrees east, 0 north: on the central meridian of UTM zone 32 by its
# definition (500,000 m east), on the equator by that of every system here
SYSTEMS = {
    "EPSG:32632": rasterio.transform.from_origin(500_000 - 150, 100, 10, 10),
    "EPSG:4326": rasterio.transform.from_origin(9 - 0.15, 0.1, 0.01, 0.01),
    "EPSG:3857": rasterio.transform.from_origin(1001875.4171 - 150, 100, 10, 10),  # 9 / 180 * pi * 6378137 m
}


def write_table(folder, rows):
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("columns", [{}, {"lon": "", "lat": " "}])
def test_the_center_of_a_file_is_taken_where_the_table_has_none(tmp_path, columns):
    rows = []
    for number, (crs, transform) in enumerate([*SYSTEMS.items()] * 2):
        write_scene(tmp_path / f"{number}.tif", VALUES, crs=crs, transform=transform)
        split = ("train", "train", "train", "id_val", "id_test", "id_test")[number]
        rows.append({"path": f"{number}.tif", "label": "a", "split": split, "group": "g", **columns})
    if columns:
        rows[0] |= {"lon": "1.5", "lat": "2.5"}
    write_table(tmp_path, rows)
    domains = get_benchmark("place_folder").read(tmp_path, bands=5)
    metadata = np.concatenate([domain.metadata for domain in domains])
    expected = np.tile(np.float32([9, 0]), (6, 1))
    expected[0] = (1.5, 2.5) if columns else (9, 0)
    np.testing.assert_allclose(metadata, expected, atol=1e-5)
    paths = [str(tmp_path / "4.tif"), str(tmp_path / "1.tif")]
    table = Metadata(tmp_path / "metadata.csv")
    np.testing.assert_allclose([table.of(path) for path in paths], [[9, 0], [9, 0]], atol=1e-5)


def test_points_beside_a_map_of_the_earth_have_no_coordinates(tmp_path):
    # Mollweide: the ellipse of the Earth is 36,080 by 18,040 km, and its poles and center follow from that
    size = 30, 20
    transform = rasterio.transform.from_origin(-18_040_096, 9_020_048, 36_080_192 / size[0], 18_040_096 / size[1])
    write_scene(tmp_path / "a.tif", VALUES, crs="ESRI:54009", transform=transform)
    with rasterio.open(tmp_path / "a.tif") as raster:
        places = places_of(raster, [0, 15, 15, 22.5], [0, 10, 0.001, 10])
    np.testing.assert_allclose(places[[0, 1, 3]], [[np.nan, np.nan], [0, 0], [90, 0]], atol=0.1)
    assert places[2, 1] > 88


def test_a_file_without_georeference_is_named(tmp_path, monkeypatch):
    write_scene(tmp_path / "placed.tif", VALUES)
    local = 'LOCAL_CS["site",UNIT["metre",1]]'
    write_scene(tmp_path / "local.tif", VALUES, crs=local, transform=SYSTEMS["EPSG:32632"])
    write_scene(tmp_path / "bare.tif", VALUES, crs=None, transform=None)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    for name in ("bare.tif", "a.png", "local.tif"):
        rows = [{"path": path, "label": "a", "split": "train", "group": "g"} for path in ("placed.tif", name)]
        write_table(tmp_path, rows)
        with pytest.raises(
            DataError, match=rf"{name}': has no georeference, and no coordinates in metadata.csv; write"
        ):
            get_benchmark("place_folder").read(tmp_path)
    write_table(tmp_path, [{**row, "lon": ""} for row in rows])
    with pytest.raises(DataError, match="has one of the columns lon and lat"):
        get_benchmark("place_folder").read(tmp_path)
    write_table(tmp_path, rows[:1])
    monkeypatch.setitem(__import__("sys").modules, "rasterio", None)
    with pytest.raises(MissingDependencyError, match=r"needs rasterio.*timm_moe_dg\[geo\]"):
        get_benchmark("place_folder").read(tmp_path)
