"""The command that cuts tiles: further scenes, and mistakes that leave nothing behind."""

import pytest

from tests.geo_files import halves, tiles, write_labels, write_scene
from tests.load_tool import load_tool
from timm_moe_dg.data import get_benchmark

pytest.importorskip("rasterio")
WHOLE = [("a", (0, 0, 128, 96))]


def test_further_scenes_are_further_groups_which_may_be_held_out(tmp_path):
    labels = write_labels(tmp_path / "labels.geojson", WHOLE)
    near, far = (write_scene(tmp_path / f"{name}.tif", halves()) for name in ("near", "far"))
    first = tiles(near, labels, tmp_path / "data")
    table = tmp_path / "data" / "metadata.csv"
    table.write_text(table.read_text().rstrip())  # as an editor may save it
    rows = tiles(far, labels, tmp_path / "data", "--split", "ood_test")
    assert rows[: len(first)] == first
    assert {(row["group"], row["split"]) for row in rows[len(first) :]} == {("far", "ood_test")}
    roles = {domain.name for domain in get_benchmark("place_folder").read(tmp_path / "data", bands=5)}
    assert roles == {"train near", "id near", "ood far"}
    before = sorted((tmp_path / "data").rglob("*"))
    elsewhere = write_scene(tmp_path / "nowhere.tif", halves(), crs="EPSG:32655")
    for scene, message in ((far, "output=.*far"), (elsewhere, "labels=")):
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
        load_tool("tiles").main([str(scene), str(labels), "--output", str(tmp_path / "data"), *words])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.geojson", "scene.tif"]
