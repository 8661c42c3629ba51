"""Your own images with coordinates: what is read, and what is wrong with bad tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.readers.files import by_name, gray_of, write_csv, write_image
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.places import read_place_folder
from timm_moe_dg.errors import ArgumentError, DataError


def own_rows() -> list[dict[str, Any]]:
    parts = ["train", "train", "id_val", "id_test", "ood_test", "ood_val"]
    groups = ["north", "south", "north", "south", "east", "east"]
    return [
        {"path": f"tiles/{row}.png", "label": ["forest", "city"][row % 2], "lon": 10.0 * row, "lat": -5.0 * row,
         "split": part, "group": group}
        for row, (part, group) in enumerate(zip(parts, groups, strict=True))
    ]  # fmt: skip


def write_own(root: Path, rows: list[dict[str, Any]]) -> Path:
    for row in range(6):
        write_image(root / "tiles" / f"{row}.png", gray=20 * row)
    write_csv(root / "metadata.csv", rows)
    return root


def test_a_folder_with_a_table_of_coordinates(tmp_path: Path) -> None:
    domains = by_name(read_place_folder(write_own(tmp_path, own_rows())))
    assert list(domains) == ["train north", "train south", "id south", "ood east"]
    north = domains["train north"]
    assert north.classes == ("city", "forest")
    assert list(north.targets) == [1, 1]
    assert north.metadata.tolist() == [[0.0, 0.0], [20.0, -10.0]]
    assert (north.split.inside.tolist(), north.split.outside.tolist()) == ([0], [1])
    assert gray_of(domains["ood east"], 0) == 80
    assert domains["ood east"].split.outside.tolist() == [1]


def test_unknown_coordinates_are_said_to_be_unknown(tmp_path: Path) -> None:
    rows = own_rows()
    rows[0] |= {"lon": "nan", "lat": "nan"}
    assert np.isnan(by_name(read_place_folder(write_own(tmp_path, rows)))["train north"].metadata[0]).all()


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        (4, {"lon": ""}, r"column 'lon' is \[''\] in lines 4"),
        (2, {"lat": "north"}, r"column 'lat' is \['north'\] in lines 2"),
        (7, {"lat": "111.5"}, r"column 'lat' is \['111.5'\] in lines 7.*-90..90"),
        (3, {"lon": "190"}, r"column 'lon' .*lines 3.*-180..180"),
        (5, {"split": "validation"}, r"column 'split' is \['validation'\] in lines 5.*id_val"),
        (6, {"group": ""}, r"column 'group' .*lines 6"),
        (2, {"path": "tiles/none.png"}, r"column 'path' is \['tiles/none.png'\] in lines 2"),
        (2, {"label": " "}, r"column 'label' .*lines 2"),
    ],
)
def test_missing_and_wrong_fields_are_named_by_line(
    line: int, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    rows = own_rows()
    rows[line - 2] |= changed
    with pytest.raises(DataError, match=message):
        read_place_folder(write_own(tmp_path, rows))


def test_missing_files_columns_and_splits_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metadata.csv.*cannot be read"):
        read_place_folder(tmp_path / "nowhere")
    rows = [{key: row[key] for key in ("path", "label", "split", "group")} for row in own_rows()]
    write_own(tmp_path, rows)
    with pytest.raises(DataError, match="lacks the columns lon, lat"):
        read_place_folder(tmp_path)
    write_own(tmp_path, [row for row in own_rows() if row["split"] != "id_val"])
    with pytest.raises(DataError, match="id_val"):
        read_place_folder(tmp_path)


@pytest.mark.parametrize("path", ["../outside.png", "tiles/../../outside.png", "ABSOLUTE", "tiles", "x" * 5000])
def test_images_lie_below_the_folder(path: str, tmp_path: Path) -> None:
    write_image(tmp_path / "outside.png", gray=9)
    rows = own_rows()
    rows[0]["path"] = str(tmp_path / "outside.png") if path == "ABSOLUTE" else path
    with pytest.raises(DataError, match=r"column 'path' is .* in lines 2; every row needs an image below the folder"):
        read_place_folder(write_own(tmp_path / "own", rows))


def test_a_group_called_all_is_a_group_like_others(tmp_path: Path) -> None:
    rows = own_rows()
    for row in rows:
        row["group"] = row["group"].replace("south", "all")
    domains = read_place_folder(write_own(tmp_path, rows))
    assert [domain.group for domain in domains] == ["all", "north", "all", "east"]
    assert [len(domain) for domain in domains] == [1, 2, 1, 2]
    assert gray_of(domains[0], 0) == 20


def with_columns(**values: Any) -> list[dict[str, Any]]:
    return [row | {name: column[number] for name, column in values.items()} for number, row in enumerate(own_rows())]


def test_further_columns_follow_the_coordinates(tmp_path: Path) -> None:
    rows = with_columns(year=[2001, 2002.5, "nan", 2004, 2005, 2006], sensor=[1, 2, 1, 2, 1, 2])
    domains = get_benchmark("place_folder").read(write_own(tmp_path, rows), metadata_columns=("sensor", "year"))
    north = by_name(list(domains))["train north"]
    assert north.metadata.dtype == np.float32
    np.testing.assert_array_equal(north.metadata, [[0.0, 0.0, 1.0, 2001.0], [20.0, -10.0, 1.0, np.nan]])
    assert read_place_folder(tmp_path)[0].metadata.shape == (2, 2)


@pytest.mark.parametrize("bad", ["2013-06-05", "", "inf", "1e39", "Sentinel-2"])
def test_a_column_that_is_not_numeric_is_named_by_file_and_line(tmp_path: Path, bad: str) -> None:
    rows = with_columns(time=[1, 2, 3, bad, 5, 6])
    with pytest.raises(DataError, match=r"metadata\.csv': column 'time' is .* in lines 5; .* a number") as caught:
        read_place_folder(write_own(tmp_path, rows), ("time",))
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metadata\.csv': lacks the columns time; it has path, label"):
        read_place_folder(write_own(tmp_path, own_rows()), ("time",))


@pytest.mark.parametrize("name", ["geo_digits", "FMoW", "PACS"])
def test_other_benchmarks_take_no_columns(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"metadata_columns=\['time'\]: .*; use --dataset place_folder, or leave"):
        get_benchmark(name).read(None, metadata_columns=("time",))
