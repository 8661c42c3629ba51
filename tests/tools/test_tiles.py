"""Tiles of a scene: their values, labels and places, splits by blocks, and mistakes that leave nothing behind."""

import csv
import json
from collections import defaultdict

import numpy as np
import pytest

from tests.geo_files import ORIGIN, PIXEL, halves, write_scene
from tests.load_tool import load_tool
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.images import read_pixels

rasterio = pytest.importorskip("rasterio")
warp = pytest.importorskip("rasterio.warp")
SIZE = ["--size", "16", "--block", "2"]


def polygon(left, top, right, bottom, crs="EPSG:32631"):
    """A rectangle in pixels of the scene, as GeoJSON in degrees or another system."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    ring = [(ORIGIN[0] + PIXEL * x, ORIGIN[1] - PIXEL * y) for x, y in corners]
    return warp.transform_geom("EPSG:32631", crs, {"type": "Polygon", "coordinates": [ring]})


def write_labels(path, shapes, crs="EPSG:4326", column="label"):
    features = [
        {"type": "Feature", "geometry": polygon(*shape, crs), "properties": {column: name}} for name, shape in shapes
    ]
    table = {"type": "FeatureCollection", "features": features}
    if crs != "EPSG:4326":
        table["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:{crs.replace(':', '::')}"}}
    path.write_text(json.dumps(table))
    return path


@pytest.fixture
def scene(tmp_path):
    return write_scene(tmp_path / "scene.tif", halves())


def tiles(scene, labels, output, *words):
    load_tool("tiles").main([str(scene), str(labels), *SIZE, "--output", str(output), *words])
    with (output / "metadata.csv").open() as file:
        return list(csv.DictReader(file))


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
    assert [row["label"] for row in rows] == [names[column // 4] for _ in range(6) for column in range(8)]
    values = halves()
    for row in rows:
        place = [int(number) for number in row["path"][6:-4].split("_")]
        top, left = place[0] * 16, place[1] * 16
        with rasterio.open(tmp_path / "data" / row["path"]) as tile, rasterio.open(scene) as whole:
            np.testing.assert_array_equal(tile.read(), values[:, top : top + 16, left : left + 16])
            assert (tile.crs, tile.descriptions) == (whole.crs, whole.descriptions)
            assert tile.xy(0, 0) == whole.xy(top, left)
            x, y = tile.xy(7.5, 7.5)
            (lon,), (lat,) = warp.transform(tile.crs, "EPSG:4326", [x], [y])
        np.testing.assert_allclose([float(row["lon"]), float(row["lat"])], [lon, lat], atol=1e-5)
    splits = defaultdict(set)
    for row in rows:
        splits[int(row["path"][6:10]) // 2, int(row["path"][11:15]) // 2].add(row["split"])
    assert all(len(names) == 1 for names in splits.values())
    assert list(splits.values()).count({"id_val"}) == 12 // 5
    domains = get_benchmark("place_folder").read(tmp_path / "data", bands=("sentinel2:B04", "sentinel2:B02"))
    path = domains[0].file(0)
    np.testing.assert_allclose(domains[0].pixels(0), read_pixels(path, 5)[[2, 0]])


def test_labels_of_a_raster_may_be_below_zero(scene, tmp_path):
    codes = np.full((1, 96, 128), -1, np.int16)
    codes[:, :, 64:] = [[[0] * 32 + [2] * 32]]
    labels = write_scene(tmp_path / "labels.tif", codes)
    rows = tiles(scene, labels, tmp_path / "data")
    assert [row["label"] for row in rows] == ["-1", "-1", "-1", "-1", "0", "0", "2", "2"] * 6


def test_edges_are_straight_in_the_polygons_own_system(scene, tmp_path):
    with rasterio.open(scene) as raster:  # whose system bends a parallel of 24 degrees by 70 km
        (_,), (border,) = warp.transform(raster.crs, "EPSG:4326", *([value] for value in raster.xy(47, 64)))
    west, east = -10.0, 14.0
    features = []
    for name, south, north in (("north", border, 60.0), ("south", 40.0, border)):
        ring = [[west, south], [east, south], [east, north], [west, north], [west, south]]
        shape = {"type": "Polygon", "coordinates": [ring]}
        features.append({"type": "Feature", "geometry": shape, "properties": {"label": name}})
    (tmp_path / "labels.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    rows = tiles(scene, tmp_path / "labels.geojson", tmp_path / "data")
    assert [row["label"] for row in rows] == ["north"] * 24 + ["south"] * 24


def test_polygons_in_collections_count_and_lines_and_overlaps_are_named(scene, tmp_path, caplog):
    labels = write_labels(tmp_path / "labels.geojson", [("a", (0, 0, 64, 96)), ("b", (64, 0, 128, 96))])
    table = json.loads(labels.read_text())
    line = {"type": "LineString", "coordinates": [[3.0, 50.5], [3.1, 50.5]]}
    others = [{"type": "Feature", "geometry": shape, "properties": {"label": "road"}} for shape in (line, None)]
    features = [*table["features"], *others]
    features[0]["geometry"] = {"type": "GeometryCollection", "geometries": [line, features[0]["geometry"]]}
    labels.write_text(json.dumps({**table, "features": features}))
    rows = tiles(scene, labels, tmp_path / "data")
    assert [row["label"] for row in rows] == ["a"] * 4 + ["b"] * 4 + (["a"] * 4 + ["b"] * 4) * 5
    assert [record.getMessage().partition("': ")[2] for record in caplog.records] == [
        "2 labeled features without a polygon are left out"
    ]
    caplog.clear()
    write_labels(labels, [("a", (0, 0, 64, 96)), ("b", (48, 0, 128, 96))])
    rows = tiles(scene, labels, tmp_path / "more")
    assert [row["label"] for row in rows] == (["a"] * 3 + ["b"] * 5) * 6
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


def test_transparent_tiles_are_without_data_and_dark_infrared_is_not(tmp_path, capsys):
    values = (halves()[:4] // 256).astype(np.uint8)
    values[3] = 255
    values[:, :, :40] = 0
    values[:3, 48:, :40] = [[[3]], [[4]], [[5]]]  # water
    scene = write_scene(tmp_path / "scene.tif", values, photometric="rgb", alpha="yes")
    labels = write_labels(tmp_path / "labels.geojson", [("a", (0, 0, 128, 96))])
    rows = tiles(scene, labels, tmp_path / "data")
    assert {row["path"][6:-4] for row in rows if row["path"][11:15] < "0002"} == {
        f"000{row}_000{column}" for row in (3, 4, 5) for column in (0, 1)
    }
    assert "a: 42 tiles\nwithout data: 6 tiles\n" in capsys.readouterr().out


def test_a_palette_and_scales_stay_with_the_tiles(tmp_path):
    colors = {code: (30 * code, 255 - 30 * code, 7 * code, 255) for code in range(8)}
    scene = write_scene(tmp_path / "scene.tif", (halves()[:1] % 8).astype(np.uint8), photometric="palette")
    with rasterio.open(scene, "r+") as file:
        file.write_colormap(1, colors)
        file.scales, file.offsets = [0.1], [-1]
    rows = tiles(scene, write_labels(tmp_path / "a.geojson", [("a", (0, 0, 128, 96))]), tmp_path / "data")
    whole = np.asarray(read_pixels(str(scene)))
    assert len(np.unique(whole.reshape(-1, 3), axis=0)) == len(colors)
    np.testing.assert_array_equal(read_pixels(str(tmp_path / "data" / rows[0]["path"])), whole[:16, :16])
    with rasterio.open(tmp_path / "data" / rows[0]["path"]) as tile:
        assert (tile.scales, tile.offsets) == ((0.1,), (-1,))


def test_an_internal_mask_stays_with_the_tiles(tmp_path):
    values, mask = halves(), np.full((96, 128), 255, np.uint8)
    mask[:, 5] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        scene = write_scene(tmp_path / "scene.tif", values)
        with rasterio.open(scene, "r+") as file:
            file.write_mask(mask)
    rows = tiles(scene, write_labels(tmp_path / "a.geojson", [("a", (0, 0, 128, 96))]), tmp_path / "data")
    missing = read_pixels(str(tmp_path / "data" / rows[0]["path"]), 5).isnan()
    assert missing[:, :, 5].all()
    assert missing.sum() == 5 * 16


def test_further_scenes_are_further_groups_which_may_be_held_out(scene, tmp_path):
    labels = write_labels(tmp_path / "labels.geojson", [("a", (0, 0, 128, 96))])
    scene.rename(tmp_path / "near.tif")
    write_scene(tmp_path / "far.tif", halves())
    first = tiles(tmp_path / "near.tif", labels, tmp_path / "data")
    table = tmp_path / "data" / "metadata.csv"
    table.write_text(table.read_text().rstrip())  # as an editor may save it
    rows = tiles(tmp_path / "far.tif", labels, tmp_path / "data", "--split", "ood_test")
    assert rows[: len(first)] == first
    assert {(row["group"], row["split"]) for row in rows[len(first) :]} == {("far", "ood_test")}
    roles = {domain.name for domain in get_benchmark("place_folder").read(tmp_path / "data", bands=5)}
    assert roles == {"train near", "id near", "ood far"}
    before = sorted((tmp_path / "data").rglob("*"))
    with pytest.raises(SystemExit, match=r"output=.*data': holds far already"):
        tiles(tmp_path / "far.tif", labels, tmp_path / "data")
    write_scene(tmp_path / "nowhere.tif", halves(), crs="EPSG:32655")
    with pytest.raises(SystemExit, match=r"labels=.*of no tile of"):
        tiles(tmp_path / "nowhere.tif", labels, tmp_path / "data")
    assert sorted((tmp_path / "data").rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"white": 1}, r"scene.tif': has zero as white; convert it to gray"),
        ({"crs": None}, r"scene.tif': has no coordinate reference system"),
        ({"labels": [("a", (500, 500, 600, 600))]}, r"labels=.*cover 0.5 of no tile of .*--cover"),
        ({"words": ["--size", "97"]}, r"size=97: is larger than the scene, 128 x 96 pixels"),
        ({"words": ["--column", "kind"]}, r"column='kind': no polygon of .* has it; its properties are label"),
        ({"words": ["--block", "6"]}, r"block=6: the labeled tiles are in 2 blocks"),
        ({"text": "{}"}, r"labels=.*cannot be read as GeoJSON"),
        ({"text": "no"}, r"labels=.*cannot be read as GeoJSON"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, change, message):
    place = {"crs": None, "transform": None} if "crs" in change else {}
    place |= {"photometric": "miniswhite"} if "white" in change else {}
    scene = write_scene(tmp_path / "scene.tif", halves()[: change.get("white")], **place)
    labels = write_labels(tmp_path / "labels.geojson", change.get("labels", [("a", (0, 0, 128, 96))]))
    if "text" in change:
        labels.write_text(change["text"])
    with pytest.raises(SystemExit, match=message):
        tiles(scene, labels, tmp_path / "data", *change.get("words", ()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.geojson", "scene.tif"]
