"""Tiles of a scene: their values, labels and places, and splits by blocks."""

from collections import defaultdict

import numpy as np
import pytest

from tests.geo_files import halves, polygon, tiles, write_features, write_labels, write_scene
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.data.readers.rasters import places_of

rasterio = pytest.importorskip("rasterio")
warp = pytest.importorskip("rasterio.warp")


@pytest.fixture
def scene(tmp_path):
    return write_scene(tmp_path / "scene.tif", halves())


@pytest.fixture
def whole(tmp_path):
    """One label for a whole scene."""
    return write_labels(tmp_path / "labels.geojson", [("a", (0, 0, 128, 96))])


def labels_of(rows):
    return [row["label"] for row in rows]


@pytest.mark.parametrize("kind", ["EPSG:4326", "EPSG:3857", "raster"])
def test_tiles_have_the_scene_s_values_the_label_that_covers_them_and_their_place(scene, tmp_path, kind):
    shapes = [("field", (0, 0, 64, 96)), ("wood", (68, 0, 124, 96))]  # of the last column three quarters
    if kind == "raster":
        codes = np.zeros((96, 128), np.uint8)
        for code, (_, (left, top, right, bottom)) in enumerate(shapes, 1):
            codes[top:bottom, left:right] = code
        labels = write_scene(tmp_path / "labels.tif", codes[None], nodata=0)
    else:
        labels = write_labels(tmp_path / "labels.geojson", shapes, kind)
    rows = tiles(scene, labels, tmp_path / "data")
    names = ("1", "2") if kind == "raster" else ("field", "wood")
    assert labels_of(rows) == [names[column // 4] for _ in range(6) for column in range(8)]
    values, splits = halves(), defaultdict(set)
    for row in rows:
        place = [int(number) for number in row["path"][6:-4].split("_")]
        splits[place[0] // 2, place[1] // 2].add(row["split"])
        top, left = place[0] * 16, place[1] * 16
        with rasterio.open(tmp_path / "data" / row["path"]) as tile, rasterio.open(scene) as scene_file:
            np.testing.assert_array_equal(tile.read(), values[:, top : top + 16, left : left + 16])
            assert (tile.crs, tile.descriptions) == (scene_file.crs, scene_file.descriptions)
            assert tile.xy(0, 0) == scene_file.xy(top, left)
            x, y = tile.xy(7.5, 7.5)
            (lon,), (lat,) = warp.transform(tile.crs, "EPSG:4326", [x], [y])
        np.testing.assert_allclose([float(row["lon"]), float(row["lat"])], [lon, lat], atol=1e-5)
    assert all(len(names) == 1 for names in splits.values())
    assert list(splits.values()).count({"id_val"}) == 12 // 5
    domains = get_benchmark("place_folder").read(tmp_path / "data", bands=("sentinel2:B04", "sentinel2:B02"))
    np.testing.assert_allclose(domains[0].pixels(0), read_pixels(domains[0].file(0), 5)[[2, 0]])


def test_labels_of_a_raster_may_be_below_zero(scene, tmp_path):
    codes = np.full((1, 96, 128), -1, np.int16)
    codes[:, :, 64:] = [[[0] * 32 + [2] * 32]]
    rows = tiles(scene, write_scene(tmp_path / "labels.tif", codes), tmp_path / "data")
    assert labels_of(rows) == ["-1", "-1", "-1", "-1", "0", "0", "2", "2"] * 6


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_pixels_beside_a_label_raster_or_hidden_by_its_mask_have_no_label(scene, tmp_path, dtype):
    mask = np.full((96, 64), 255, np.uint8)
    mask[:16] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        labels = write_scene(tmp_path / "labels.tif", np.ones((1, *mask.shape), dtype))  # the left half
        with rasterio.open(labels, "r+") as file:
            file.write_mask(mask)
    rows = tiles(scene, labels, tmp_path / "data")
    names = [f"scene/{row:04}_{column:04}.tif" for row in range(1, 6) for column in range(4)]
    assert [row["path"] for row in rows] == names
    assert set(labels_of(rows)) == {"1"}


def test_edges_are_straight_in_the_polygons_own_system(scene, tmp_path):
    with rasterio.open(scene) as raster:  # whose system bends a parallel of 24 degrees by 70 km
        (_,), (border,) = warp.transform(raster.crs, "EPSG:4326", *([value] for value in raster.xy(47, 64)))
    west, east = -10.0, 14.0
    shapes = []
    for name, south, north in (("north", border, 60.0), ("south", 40.0, border)):
        ring = [[west, south], [east, south], [east, north], [west, north], [west, south]]
        shapes.append((name, {"type": "Polygon", "coordinates": [ring]}))
    rows = tiles(scene, write_features(tmp_path / "labels.geojson", shapes), tmp_path / "data")
    assert labels_of(rows) == ["north"] * 24 + ["south"] * 24


def test_polygons_in_collections_count_and_lines_and_overlaps_are_named(scene, tmp_path, caplog):
    line = {"type": "LineString", "coordinates": [[3.0, 50.5], [3.1, 50.5]]}
    left, right = (polygon(*shape, "EPSG:4326") for shape in ((0, 0, 64, 96), (64, 0, 128, 96)))
    shapes = [("a", {"type": "GeometryCollection", "geometries": [line, left]}), ("b", right)]
    labels = write_features(tmp_path / "labels.geojson", [*shapes, ("road", line), ("road", None)])
    assert labels_of(tiles(scene, labels, tmp_path / "data")) == (["a"] * 4 + ["b"] * 4) * 6
    (message,) = caplog.messages
    assert "2 labeled features without a polygon are left out" in message
    write_labels(labels, [("a", (0, 0, 64, 96)), ("b", (48, 0, 128, 96))])
    assert labels_of(tiles(scene, labels, tmp_path / "more")) == (["a"] * 3 + ["b"] * 5) * 6
    assert f"{16 * 96} pixels lie in polygons of several labels, of which the last in the file" in caplog.text


def test_tiles_without_data_or_a_label_are_left_out(tmp_path, capsys):
    values = halves()
    values[:, :24] = 0  # the first row of tiles, and half of the second
    scene = write_scene(tmp_path / "scene.tif", values, nodata=0)
    labels = write_labels(tmp_path / "labels.geojson", [("a", (0, 0, 128, 90))])
    rows = tiles(scene, labels, tmp_path / "data", "--cover", "0.7")
    assert {row["path"][6:10] for row in rows} == {"0001", "0002", "0003", "0004"}
    printed = capsys.readouterr().out
    assert printed.startswith("a: 32 tiles\nwithout a label: 8 tiles\nwithout data: 8 tiles\n")
    assert read_pixels(str(tmp_path / "data" / rows[0]["path"]), 5).isnan().float().mean() == 0.5


@pytest.mark.parametrize("name", ["", "nir"])
def test_transparent_tiles_are_without_data_and_described_infrared_is_no_transparency(tmp_path, whole, capsys, name):
    values = (halves()[:4] // 256).astype(np.uint8)
    values[3] = 255
    values[3, :, :40] = 0
    scene = write_scene(tmp_path / "scene.tif", values, photometric="rgb", alpha="yes")
    if name:
        with rasterio.open(scene, "r+") as file:
            file.descriptions = ("red", "green", "blue", name)
    rows = tiles(scene, whole, tmp_path / "data")
    assert len(rows) == (48 if name else 36)
    assert ("a: 36 tiles\nwithout data: 12 tiles\n" in capsys.readouterr().out) is not bool(name)


def test_a_palette_scales_and_a_mask_stay_with_the_tiles(tmp_path, whole):
    colors = {code: (30 * code, 255 - 30 * code, 7 * code, 255) for code in range(8)}
    mask = np.full((96, 128), 255, np.uint8)
    mask[:, 5] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        scene = write_scene(tmp_path / "scene.tif", (halves()[:1] % 8).astype(np.uint8), photometric="palette")
        with rasterio.open(scene, "r+") as file:
            file.write_colormap(1, colors)
            file.scales, file.offsets = [0.1], [-1]
            file.write_mask(mask)
    path = tmp_path / "data" / tiles(scene, whole, tmp_path / "data")[0]["path"]
    pixels = read_pixels(str(path))
    np.testing.assert_array_equal(pixels, read_pixels(str(scene))[:, :16, :16])
    assert pixels.isnan()[:, :, 5].all()
    assert pixels.isnan().sum() == 3 * 16
    with rasterio.open(path) as tile:
        assert (tile.scales, tile.offsets) == ((0.1,), (-1,))


def test_points_beside_a_map_of_the_earth_have_no_coordinates(tmp_path):
    # Mollweide: the ellipse of the Earth is 36,080 by 18,040 km, and its poles and center follow from that
    transform = rasterio.transform.from_origin(-18_040_096, 9_020_048, 36_080_192 / 30, 18_040_096 / 20)
    write_scene(tmp_path / "a.tif", np.ones((5, 20, 30), np.uint16), crs="ESRI:54009", transform=transform)
    with rasterio.open(tmp_path / "a.tif") as raster:
        places = places_of(raster, [0, 15, 15, 22.5], [0, 10, 0.001, 10])
    np.testing.assert_allclose(places[[0, 1, 3]], [[np.nan, np.nan], [0, 0], [90, 0]], atol=0.1)
    assert places[2, 1] > 88
