"""The command that cuts tiles: further scenes, and mistakes that leave nothing behind."""

import json

import pytest

from tests.geo_files import halves, tiles, write_labels, write_scene
from tests.load_tool import run_tool
from tests.storage.test_files import full_disk
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.storage.files import owned

pytest.importorskip("rasterio")
WHOLE = [("a", (0, 0, 128, 96))]


def test_further_scenes_are_further_groups_which_may_be_held_out(tmp_path):
    labels = write_labels(tmp_path / "labels.geojson", WHOLE)
    near, far = (write_scene(tmp_path / f"{name}.tif", halves()) for name in ("-12_near", "far"))
    first = tiles(near, labels, tmp_path / "data")
    table = tmp_path / "data" / "metadata.csv"
    table.write_text(table.read_text().rstrip())  # as an editor may save it
    rows = tiles(far, labels, tmp_path / "data", "--split", "ood_test")
    assert rows[: len(first)] == first
    assert {(row["group"], row["split"]) for row in rows[len(first) :]} == {("far", "ood_test")}
    roles = {domain.name for domain in get_benchmark("place_folder").read(tmp_path / "data", bands=5)}
    assert roles == {"train -12_near", "id -12_near", "ood far"}
    before = sorted((tmp_path / "data").rglob("*"))
    elsewhere = write_scene(tmp_path / "nowhere.tif", halves(), crs="EPSG:32655")
    for scene, message in ((near, "output=.*near"), (far, "output=.*far"), (elsewhere, "labels=")):
        with pytest.raises(SystemExit, match=message):
            tiles(scene, labels, tmp_path / "data")
    assert sorted((tmp_path / "data").rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crs": None}, r"scene.tif': .*\(CRS\)"),
        ({"labels": [("a", (500, 500, 600, 600))]}, "labels=.*--cover"),
        ({"words": ["--size", "97"]}, "size=97"),
        ({"words": ["--column", "kind"]}, "column='kind': .*label"),
        ({"words": ["--block", "6"]}, "block=6: .*2 blocks"),
        ({"text": "{}"}, "labels=.*GeoJSON"),
        ({"text": "no"}, "labels=.*GeoJSON"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path, change, message):
    place = {"crs": None, "transform": None} if "crs" in change else {}
    scene = write_scene(tmp_path / "scene.tif", halves(), **place)
    labels = write_labels(tmp_path / "labels.geojson", change.get("labels", WHOLE))
    if "text" in change:
        labels.write_text(change["text"])
    words = ["--size", "16", "--block", "2", *change.get("words", ())]
    with pytest.raises(SystemExit, match=message):
        run_tool("tiles", scene, labels, "--output", tmp_path / "data", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.geojson", "scene.tif"]


@pytest.fixture
def labels(tmp_path):
    return write_labels(tmp_path / "labels.geojson", WHOLE)


@pytest.mark.parametrize("limit", [200, 2000])
def test_a_disk_that_is_full_ends_the_command_and_leaves_nothing(tmp_path, labels, limit):
    scene = write_scene(tmp_path / "scene.tif", halves())
    with pytest.raises(SystemExit, match=r"output=.*cannot be written"), full_disk(limit):
        tiles(scene, labels, tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.geojson", "scene.tif"]
    assert len(tiles(scene, labels, tmp_path / "data")) == 48


def test_a_folder_has_one_command_at_a_time(tmp_path, labels):
    scene = write_scene(tmp_path / "scene.tif", halves())
    with owned(tmp_path / "data"), pytest.raises(SystemExit, match=r"output=.*in use"):
        tiles(scene, labels, tmp_path / "data")


def test_tiles_without_rows_are_cut_again_and_other_files_stay(tmp_path, labels):
    scene = write_scene(tmp_path / "scene.tif", halves())
    rows = tiles(scene, labels, tmp_path / "data")
    (tmp_path / "data" / "metadata.csv").unlink()
    assert tiles(scene, labels, tmp_path / "data") == rows
    (tmp_path / "data" / "metadata.csv").unlink()
    (tmp_path / "data" / "scene" / "notes.txt").write_text("own")
    with pytest.raises(SystemExit, match="holds scene already"):
        tiles(scene, labels, tmp_path / "data")
    assert (tmp_path / "data" / "scene" / "notes.txt").exists()


@pytest.mark.parametrize("change", [("\n", "\r\n"), (",", ";")])
def test_a_table_that_a_spreadsheet_saved_is_added_to(tmp_path, labels, change):
    near, far = (write_scene(tmp_path / f"{name}.tif", halves()) for name in ("near", "far"))
    rows = tiles(near, labels, tmp_path / "data")
    table = tmp_path / "data" / "metadata.csv"
    table.write_text("\ufeff" + table.read_text().replace(*change), encoding="utf-8")
    assert tiles(far, labels, tmp_path / "data")[: len(rows)] == rows


@pytest.mark.parametrize("form", ["byte order mark", "crs of null", "one feature", "empty labels"])
def test_forms_of_geojson(tmp_path, labels, form):
    table = json.loads(labels.read_text())
    if form == "crs of null":
        table["crs"] = None
    if form == "empty labels":
        table["features"] += [
            {**table["features"][0], "properties": {"label": label}} for label in ("", " ", None, "NA")
        ]
    if form == "one feature":
        table = table["features"][0]
    encoding = "utf-8-sig" if form == "byte order mark" else "utf-8"
    labels.write_text(json.dumps(table), encoding=encoding)
    rows = tiles(write_scene(tmp_path / "scene.tif", halves()), labels, tmp_path / "data")
    assert {row["label"] for row in rows} == {"a"}
    assert len(rows) == 48


# Of 63 pixels a side, tiles of 16 leave 1 - (48 / 63) ** 2
@pytest.mark.parametrize(("side", "share"), [(63, "42.0%"), (95, "29.1%"), (96, None)])
def test_an_edge_without_tiles_is_named_with_its_share(tmp_path, labels, caplog, side, share):
    tiles(write_scene(tmp_path / "scene.tif", halves(side, side)), labels, tmp_path / "data")
    assert (f"scene.tif': {share} of its area" in caplog.text) == (share is not None)
    assert ("of its area" in caplog.text) == (share is not None)


def test_a_scene_that_is_cut_short_is_named(tmp_path, labels):
    content = write_scene(tmp_path / "whole.tif", halves()).read_bytes()
    (tmp_path / "scene.tif").write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit, match=r"scene=.*scene\.tif': .*cut short"):
        tiles(tmp_path / "scene.tif", labels, tmp_path / "data")
