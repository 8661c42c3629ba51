"""Tables of images: what is taken, metadata by path, and messages that name file, line and column."""

import math
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from tests.data.files import write_csv
from tests.geo_files import write_scene
from timm_moe_dg.cli.text import csv_cell
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.csv_tables import (
    Metadata,
    Place,
    Table,
    below,
    choice,
    number,
    own_place,
    read_csv,
    text_table,
    whole_number,
)
from timm_moe_dg.data.readers.folders import find_images
from timm_moe_dg.data.readers.rasters import import_rasterio
from timm_moe_dg.errors import DataError, MissingDependencyError

rasterio = pytest.importorskip("rasterio")


@pytest.fixture
def written(tmp_path):
    def write(text, encoding="utf-8"):
        (tmp_path / "t.csv").write_bytes(text.encode(encoding))
        return tmp_path / "t.csv"

    return write


def table_of(**columns):
    return Table(Path("t.csv"), columns, range(2, 2 + len(next(iter(columns.values())))))


def test_columns_of_a_table_with_a_byte_order_mark_quotes_and_lines_of_other_lengths(written):
    text = 'a,b\r\n"1,5",x\r\n\r\n2\r\n'
    table = read_csv(written(text, "utf-8-sig"), ["a"])
    assert {name: list(fields) for name, fields in table.items()} == {"a": ["1,5", "2"], "b": ["x", ""]}
    assert list(read_csv(written("a,,\n1,,\n"), ["a"])["a"]) == ["1"]  # spreadsheets end lines so


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [
        ("a,b\n", "utf-8", "no rows"),
        ("", "utf-8", "line 1"),
        ("\n\na\n1\n", "utf-8", "line 1"),
        ("b,c\n1,2\n", "utf-8", "columns a"),
        ("a\n\u00e9\n", "latin-1", "as csv"),
        ("a,lon,lat\nx.png,1.5,2\ny.png,1,5,2\n", "utf-8", "line 3"),
        ("a,b,a\n1,2,3\n", "utf-8", "column 'a'"),
        ("#a,b\n1,2\n", "utf-8", "1 lines before the header are comments"),
    ],
)
def test_bad_tables_are_refused(written, text, encoding, message):
    with pytest.raises(DataError, match=rf"t\.csv'.*{message}"):
        read_csv(written(text, encoding), ["a"])


def test_wrong_fields_are_counted_and_the_first_are_shown():
    table = table_of(a=["1", "x", "2", " ", "", "p", "q", "3", "r"])
    with pytest.raises(DataError, match=r"'a' is \['x', ' ', '', 'p', 'q'\] in 6 lines \(3, 5, 6, 7, 8, \.\.\.\)"):
        table.parsed("a", int, "a number")
    assert table_of(a=[" 3 "]).parsed("a", int, "a number") == [3]


def test_lines_are_those_of_the_file(written):
    """Blank lines count, and so do the further lines of a field in quotes."""
    table = read_csv(written('a,b\n\n1,"x\ny"\n\n\nz,x\n1,x\n'), ["a"])
    with pytest.raises(DataError, match=r"column 'a' is \['z'\] in lines 7;"):
        table.parsed("a", int, "a number")
    with pytest.raises(DataError, match="lines 3 and 8 have the same a '1'"):
        table.check_unique("a", table["a"])


def test_values_of_tables_are_written_as_in_csv():
    values = [3.0, 4, float("nan"), None, pd.NA, np.float32(1.5), "nan"]
    table = text_table(Path("rows"), {"path": values, "location": values, "lon": values})
    assert table["location"] == ["3", "4", "-1", "-1", "-1", "1.5", "nan"]
    assert table["path"] == ["3", "4", "", "", "", "1.5", "nan"]
    assert table["lon"] == ["3", "4", "nan", "nan", "nan", "1.5", "nan"]
    with pytest.raises(DataError, match=r"rows.* \[1, 2\]"):
        text_table(Path("rows"), {"path": ["a", "b"], "location": [1]})


def test_coordinates_are_in_degrees_or_unknown():
    lonlat = table_of(lon=["-180", "nan"], lat=["90", "nan"]).coordinates()
    np.testing.assert_array_equal(lonlat, np.float32([[-180, 90], [np.nan, np.nan]]))
    for lon, lat in (("180.1", "0"), ("0", "-90.5"), ("inf", "0"), ("1_0", "0"), ("0", "abc")):
        with pytest.raises(DataError, match="in lines 3"):
            table_of(lon=["-180", lon], lat=["90", lat]).coordinates()


@pytest.mark.parametrize(
    ("parse", "good", "value", "bad"),
    [
        (
            below(Path("data")),
            "a/..b.png",
            "data/a/..b.png",
            ["../x.png", "a/../../x.png", "/etc/x.png", "..", "..\\x"],
        ),
        (number, "004", "004", ["-1", "1/2", "1.0", "\u0664"]),
        (whole_number, "-12", -12, ["1_0", "9" * 19]),
        (choice("a", "b"), "b", "b", ["c"]),
    ],
)
def test_fields_are_parsed_or_refused(parse, good, value, bad):
    assert parse(good) == value
    for text in bad:
        with pytest.raises((ValueError, KeyError)):
            parse(text)


def test_backslashes_separate_folders_unless_they_are_in_the_name(tmp_path):
    assert below(tmp_path)("a\\b.png") == str(tmp_path / "a" / "b.png")
    (tmp_path / "a\\b.png").touch()
    assert below(tmp_path)("a\\b.png") == str(tmp_path / "a\\b.png")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("b.png", "a/z.JPG", "a/c.jpeg"):
        (tmp_path / name).touch()
    return tmp_path


def test_metadata_by_path(folder):
    paths = list(find_images([str(folder)]))
    table = folder / "a" / "places.csv"
    table.write_text(f"path,lon,lat\n{folder}/b.png,1.5,-2\nz.JPG,nan,nan\nelsewhere.png,7,7\nc.jpeg,3,4\n")
    np.testing.assert_array_equal([Metadata(table).of(path) for path in paths], [[3, 4], [np.nan, np.nan], [1.5, -2]])
    table.write_text("path,location\nz.JPG,12\nc.jpeg,-1\n")
    assert [Metadata(table, ids=True).of(path) for path in paths] == [(-1,), (12,), None]
    for text, message in (
        (f"path,lon,lat\nz.JPG,1,2\nc.jpeg,3,4\n{folder}/a/z.JPG,1,2\n", "lines 2 and 4"),
        ("path,lon,lat\nz.JPG,200,0\n", "lines 2"),
    ):
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            Metadata(table)


def test_paths_of_metadata_are_compared_as_files(folder, tmp_path_factory, monkeypatch):
    """By a link to the folder, relative paths, ./ and backslashes; no path that is an image is an error."""
    link = tmp_path_factory.mktemp("links") / "site"
    link.symlink_to(folder)
    table = folder / "places.csv"
    monkeypatch.chdir(folder)
    for written in ("a/z.JPG", "./a/../a/z.JPG", "a\\z.JPG", str(folder / "a" / "z.JPG"), str(link / "a" / "z.JPG")):
        table.write_text(f"path,lon,lat\n{written},1,2\n")
        for path in ("a/z.JPG", str(link / "a" / "z.JPG")):
            assert Metadata(table).of(path) == (1, 2)
    (link.parent / "other.JPG").symlink_to(folder / "a" / "z.JPG")
    assert Metadata(table).of(str(link.parent / "other.JPG")) == (1, 2)
    Metadata(table).check(["b.png", "a/z.JPG"])
    table.write_text("path,lon,lat\nelsewhere/z.JPG,1,2\n")
    with pytest.raises(DataError, match=r"metadata=.*none of its 1 paths"):
        Metadata(table).check([str(folder / "b.png")])


VALUES = np.ones((5, 20, 30), np.uint16)
# Tiles of 30 x 20 pixels, whose center is 9 degrees east, 0 north: on the central meridian of UTM zone 32 by its
# definition (500,000 m east), on the equator by that of every system here
SYSTEMS = {
    "EPSG:32632": rasterio.transform.from_origin(500_000 - 150, 100, 10, 10),
    "EPSG:4326": rasterio.transform.from_origin(9 - 0.15, 0.1, 0.01, 0.01),
    "EPSG:3857": rasterio.transform.from_origin(1001875.4171 - 150, 100, 10, 10),  # 9 / 180 * pi * 6378137 m
}


@pytest.mark.parametrize("columns", [{}, {"lon": "", "lat": " "}])
def test_the_center_of_a_file_is_taken_where_the_table_has_none(tmp_path, columns):
    rows = []
    for row, (crs, transform) in enumerate([*SYSTEMS.items()] * 2):
        write_scene(tmp_path / f"{row}.tif", VALUES, crs=crs, transform=transform)
        split = ("train", "train", "train", "id_val", "id_test", "id_test")[row]
        rows.append({"path": f"{row}.tif", "label": "a", "split": split, "group": "g", **columns})
    if columns:
        rows[0] |= {"lon": "8.5", "lat": "0.2"}
    write_csv(tmp_path / "metadata.csv", rows)
    domains = get_benchmark("place_folder").read(tmp_path, bands=5)
    metadata = np.concatenate([domain.metadata for domain in domains])
    expected = np.tile(np.float32([9, 0]), (6, 1))
    expected[0] = (8.5, 0.2) if columns else (9, 0)
    np.testing.assert_allclose(metadata, expected, atol=1e-5)
    table = Metadata(tmp_path / "metadata.csv")
    np.testing.assert_allclose([table.of(str(tmp_path / f"{n}.tif")) for n in (4, 1)], [[9, 0], [9, 0]], atol=1e-5)


def test_a_file_without_georeference_is_named(tmp_path, monkeypatch):
    write_scene(tmp_path / "placed.tif", VALUES)
    local = 'LOCAL_CS["site",UNIT["metre",1]]'
    write_scene(tmp_path / "local.tif", VALUES, crs=local, transform=SYSTEMS["EPSG:32632"])
    write_scene(tmp_path / "bare.tif", VALUES, crs=None, transform=None)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    rows = [{"path": path, "label": "a", "split": "train", "group": "g"} for path in ("placed.tif", "bare.tif")]
    for name in ("bare.tif", "a.png", "local.tif"):
        write_csv(tmp_path / "metadata.csv", [rows[0], {**rows[1], "path": name}])
        with pytest.raises(DataError, match=rf"{name}': .*metadata.csv"):
            get_benchmark("place_folder").read(tmp_path)
    write_csv(tmp_path / "metadata.csv", [{**row, "lon": ""} for row in rows])
    with pytest.raises(DataError, match="lon and lat"):
        get_benchmark("place_folder").read(tmp_path)
    write_csv(tmp_path / "metadata.csv", rows[:1])
    import_rasterio.cache_clear()
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(MissingDependencyError, match=r"rasterio.*timm_moe_dg\[geo\]"):
        get_benchmark("place_folder").read(tmp_path)


def places(folder, rows):
    write_csv(folder / "metadata.csv", [{"label": "a", "split": "train", "group": "g", **row} for row in rows])
    return get_benchmark("place_folder").read(folder, evaluating=True)


def test_coordinates_far_from_the_image_s_own_place_are_refused(tmp_path):
    for row, (crs, transform) in enumerate(SYSTEMS.items()):
        write_scene(tmp_path / f"{row}.tif", VALUES, crs=crs, transform=transform)
    near = [{"path": f"{row}.tif", "lon": 9.5, "lat": 0.5} for row in range(3)]
    assert len(places(tmp_path, near)) == 1
    with pytest.raises(DataError, match=r"line 3: .* own place \(9\.00, .*exchanged"):
        places(tmp_path, [near[0], {**near[1], "lon": 0.5, "lat": 9.5}])
    with pytest.raises(DataError, match=r"column 'lon' is .*369.5.* in -180..180"):
        places(tmp_path, [{**near[0], "lon": 369.5}])


def gps(longitude, latitude):
    """EXIF with degrees, minutes and seconds."""
    exif = Image.Exif()
    tags = exif.get_ifd(0x8825)
    for place, value, names in ((2, latitude, "NS"), (4, longitude, "EW")):
        size = abs(value)
        tags[place - 1] = names[value < 0]
        tags[place] = (int(size), int(size * 60 % 60), round(size * 3600 % 60, 4))
    return exif


def test_photographs_have_the_place_of_their_tags(tmp_path):
    expected = [(13.4, 52.52), (-58.38, -34.6)]
    for row, place in enumerate(expected):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{row}.jpg", exif=gps(*place))
    (domain,) = places(tmp_path, [{"path": f"{row}.jpg"} for row in range(2)])
    np.testing.assert_allclose(domain.metadata, expected, atol=1e-4)
    with pytest.raises(DataError, match="exchanged"):
        places(tmp_path, [{"path": "0.jpg", "lon": 52.52, "lat": 13.4}])


def test_too_large_an_image_has_no_place(tmp_path, monkeypatch):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.jpg", exif=gps(9, 0))
    assert own_place(str(tmp_path / "a.jpg")) is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert own_place(str(tmp_path / "a.jpg")) is None
    assert len(places(tmp_path, [{"path": "a.jpg", "lon": 9, "lat": 0}])) == 1  # refused when it is read


def test_places_at_zero_are_noticed(tmp_path, caplog):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    places(tmp_path, [{"path": "a.png", "lon": 0, "lat": 0}])
    assert "1 rows have longitude 0 and latitude 0" in caplog.text


@pytest.mark.parametrize("column", ["label", "group"])
@pytest.mark.parametrize("word", ["NA", "N/A", "#N/A", "NULL", "None", "nan", "<NA>"])
def test_words_for_a_missing_value_are_no_names(tmp_path, column, word):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match=rf"column '{column}' is .*{word}.*lines 2"):
        places(tmp_path, [{"path": "a.png", "lon": 1, "lat": 1, column: word}])
    (domain,) = get_benchmark("place_folder").read(tmp_path, evaluating=True, columns={"names": f"?,{word}"})
    assert word in {*domain.classes, domain.group}


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\npath;label\na.png;x\n",
        "# cut in 2024\n# by hand\npath,label\na.png,x\n",
        "path, label\na.png, x\n",
        "\ufeffsep=,\r\npath,label\r\na.png,x\r\n",
        "path\tlabel\na.png\tx\n",
        "sep=\t\npath\tlabel\na.png\tx\n",
        '"sep=;"\npath;label\na.png;x\n',
    ],
)
def test_lines_before_the_header_and_spaces_after_separators_are_skipped(tmp_path, text):
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    table = read_csv(tmp_path / "a.csv", ["path", "label"])
    assert dict(table) == {"path": ("a.png",), "label": ("x",)}
    assert list(table.lines) == [text.count("\n")]


def test_texts_are_read_as_they_were_before_csv_cell(tmp_path):
    names = ["-12_34", "+urban", "=1+1", "@x", "-90", "'quoted'", "a"]
    write_csv(tmp_path / "a.csv", [{"path": csv_cell(name)} for name in names])
    assert list(read_csv(tmp_path / "a.csv", ["path"])["path"]) == names


def test_an_unknown_place_is_at_no_distance():
    assert np.isnan(Place((math.nan, 0.0), 0.0).distance(1, 1))
    assert Place((9.0, 0.0), 0.0).distance(10, 0) == pytest.approx(111.2, abs=0.1)
    assert Place((179.5, 0.0), 0.0).distance(-179.5, 0) == pytest.approx(111.2, abs=0.1)


@pytest.mark.parametrize(
    "tags",
    [
        {6: 120.0},  # altitude alone
        {1: "N", 2: (52.0, 31.0, 0.0), 3: "E"},
        {1: "N", 2: 52.5, 3: "E", 4: 13.4},  # numbers in place of degrees, minutes and seconds
        {1: "N", 2: (IFDRational(52, 0), 0.0, 0.0), 3: "E", 4: (13.0, 0.0, 0.0)},
        {1: "N", 2: (52.0, 31.0, 0.0), 3: "E", 4: (200.0, 0.0, 0.0)},
        {1: "N", 2: (95.0, 0.0, 0.0), 3: "E", 4: (13.0, 0.0, 0.0)},
    ],
)
def test_damaged_gps_tags_are_no_place(tmp_path, tags):
    exif = Image.Exif()
    exif.get_ifd(0x8825).update(tags)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg", exif=exif)
    assert own_place(str(tmp_path / "a.jpg")) is None
