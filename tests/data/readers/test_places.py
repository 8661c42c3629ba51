"""Tables of places as domains: who is inside and outside, by role and group; what a table lacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.files import by_name, gray_of, write_csv, write_image
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.places import PARTS, Places, domains_of, read_place_folder
from timm_moe_dg.errors import DataError, MoeDgError

PART = ["train", "id_val", "ood_test", "none", "train", "id_test", "ood_val", "id_val", "train"]
GROUP = ["b", "b", "c", "c", "a", "a", "c", "a", "b"]


def table(part=PART, group=GROUP) -> Places:
    """Row k is the gray image of level k, of class k % 2, taken at (k, -k)."""
    numbers = np.arange(len(part))
    images = [np.full((2, 2), number, dtype=np.uint8) for number in numbers]
    metadata = np.stack([numbers, -numbers], axis=1).astype(np.float32)
    return Places(("x", "y"), images, numbers % 2, metadata, np.array(part), np.array(group))


def rows(domain, part) -> list[int]:
    """Which rows of the table a part of a domain's split holds, by their pixels, labels and places."""
    actual = [domain.image(index).getpixel((0, 0))[0] for index in part]
    assert [domain.targets[index] for index in part] == [row % 2 for row in actual]
    np.testing.assert_array_equal(domain.metadata[part], [(row, -row) for row in actual] or np.zeros((0, 2)))
    return actual


def described(domains):
    """Name, group, and the rows inside and outside of each domain."""
    parts = [(rows(domain, domain.split.inside), rows(domain, domain.split.outside)) for domain in domains]
    return [(domain.name, domain.group, *part) for domain, part in zip(domains, parts, strict=True)]


OTHERS = [("id a", "a", [5], []), ("ood c", "c", [2], [6])]


@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({}, [("train a", "a", [4], [7]), ("train b", "b", [0, 8], [1])]),
        ({"pooled": True}, [("train", "all", [0, 4, 8], [1, 7])]),
        (
            {"training": np.array(["m", "n", "n", "n", "n", "m", "m", "m", "o"])},
            [("train m", "m", [0], [7]), ("train n", "n", [4], [1]), ("train o", "o", [8], [])],
        ),
    ],
)
def test_rows_go_to_the_domain_of_their_role_and_group(options, training):
    domains = domains_of(table(), **options)
    assert described(domains) == [*training, *OTHERS]
    assert [domain.role for domain in domains] == ["train"] * len(training) + ["id", "ood"]


def test_a_group_called_all_does_not_take_in_the_others():
    first, second, *_ = described(domains_of(table(group=["all" if name == "a" else name for name in GROUP])))
    assert (first[1:], second[1:]) == (("all", [4], [7]), ("b", [0, 8], [1]))


@pytest.mark.parametrize("lacking", [("train",), ("id_val",), ("id_test", "ood_test")])
def test_a_table_with_nothing_to_train_validate_or_test_on_is_refused(lacking):
    remaining = [row for row, part in enumerate(PART) if part not in lacking]
    with pytest.raises(DataError, match="split="):
        domains_of(table([PART[row] for row in remaining], [GROUP[row] for row in remaining]))
    assert set(PARTS) == set(PART) - {"none"}


def test_groups_are_taken_from_all_rows(caplog):
    part = [*PART, "ood_val", "id_val", "id_val"]
    domains = domains_of(table(part, [*GROUP, "d", "d", "e"]))
    assert [domain.name for domain in domains if domain.role == "train"] == ["train a", "train b"]
    assert "2 rows of split id_val are left out: their groups have no train row" in caplog.text
    domains = domains_of(table(part, [*GROUP, "d", "a", "b"]))
    assert sum(map(len, domains)) == len(part) - part.count("none")
    assert ("ood d", "d", [], [9]) in described(domains)


def own_rows(**columns: Any) -> list[dict[str, Any]]:
    parts = ["train", "train", "id_val", "id_test", "ood_test", "ood_val"]
    groups = ["north", "south", "north", "south", "east", "east"]
    return [
        {"path": f"tiles/{row}.png", "label": ["forest", "city"][row % 2], "lon": 10.0 * row, "lat": -5.0 * row,
         "split": part, "group": group} | {name: column[row] for name, column in columns.items()}
        for row, (part, group) in enumerate(zip(parts, groups, strict=True))
    ]  # fmt: skip


OWN_NAMES = {name: f"my_{name}" for name in ("path", "label", "group", "split", "lon", "lat")}


def write_own(root: Path, rows: list[dict[str, Any]]) -> Path:
    for row in range(6):
        write_image(root / "tiles" / f"{row}.png", gray=20 * row)
    write_csv(root / "metadata.csv", rows)
    return root


def test_a_folder_with_a_table_of_coordinates(tmp_path, caplog) -> None:
    domains = by_name(read_place_folder(write_own(tmp_path, own_rows())))
    assert list(domains) == ["train north", "train south", "id south", "ood east"]
    north = domains["train north"]
    assert north.classes == ("city", "forest")
    assert list(north.targets) == [1, 1]
    assert north.metadata.tolist() == [[0.0, 0.0], [20.0, -10.0]]
    assert (north.split.inside.tolist(), north.split.outside.tolist()) == ([0], [1])
    assert gray_of(domains["ood east"], 0) == 80
    assert domains["ood east"].split.outside.tolist() == [1]
    assert "groups without id_val rows, which no validation counts: south (1 images)" in caplog.text


def test_data_for_evaluation_need_no_training_rows(tmp_path: Path) -> None:
    rows = [*own_rows()[3:], {**own_rows()[0], "split": "id_val"}]
    domains = read_place_folder(write_own(tmp_path, rows), evaluating=True)
    assert [(domain.name, len(domain)) for domain in domains] == [("train north", 1), ("id south", 1), ("ood east", 2)]
    with pytest.raises(DataError, match="split="):
        read_place_folder(tmp_path)


@pytest.mark.parametrize(
    ("row", "changed", "message"),
    [
        (2, {"lon": ""}, "{lon}' .*lines 4"),
        (0, {"lat": "north"}, "{lat}' .*lines 2"),
        (5, {"lat": "111.5"}, r"{lat}' .*lines 7.*-90\.\.90"),
        (1, {"lon": "190"}, r"{lon}' .*lines 3.*-180\.\.180"),
        (3, {"split": "validation"}, "{split}' .*lines 5.*id_val"),
        (4, {"group": ""}, "{group}' .*lines 6"),
        (0, {"label": " "}, "{label}' .*lines 2"),
        (4, {"label": "Forest"}, "spelling"),
        (4, {"label": "forest\u200b"}, "spelling"),
        (4, {"label": "NaN"}, "{label}' .*lines 6"),
        (2, {"group": "west"}, r"{split}='id_val': .*\(west\)"),  # which has no training row
        (5, {"path": "tiles/./0.png"}, r"lines 2 and 7 have the same {path} '.*0\.png'"),
        *((0, {"path": path}, "{path}' .*lines 2") for path in ("tiles/none.png", "tiles", "x" * 5000)),
        *((0, {"path": path}, "{path}' .*lines 2") for path in ("../outside.png", "tiles/../../outside.png", "/abs")),
    ],
)
def test_missing_and_wrong_fields_are_named_by_line_and_the_table_s_own_columns(tmp_path, row, changed, message):
    write_image(tmp_path / "outside.png", gray=9)
    rows = own_rows()
    if changed.get("path") == "/abs":
        changed = {"path": str(tmp_path / "outside.png")}
    rows[row] |= changed
    for names in ({name: name for name in OWN_NAMES}, OWN_NAMES):
        write_own(tmp_path / "own", [{names[name]: value for name, value in fields.items()} for fields in rows])
        with pytest.raises(DataError, match=message.format(**names)) as caught:
            read_place_folder(tmp_path / "own", columns=names)
        assert "\n" not in str(caught.value)


def test_a_missing_coordinate_is_named_by_the_table_s_own_columns(tmp_path):
    rows = [{OWN_NAMES[name]: value for name, value in fields.items() if name != "lat"} for fields in own_rows()]
    with pytest.raises(DataError, match="my_lon"):
        read_place_folder(write_own(tmp_path, rows), columns={k: v for k, v in OWN_NAMES.items() if k != "lat"})
    for fields in rows:
        fields |= {"my_lat": "", "my_lon": ""}
    with pytest.raises(DataError, match="my_lon and my_lat"):
        read_place_folder(write_own(tmp_path, rows), columns=OWN_NAMES)


def test_further_columns_follow_the_coordinates(tmp_path: Path) -> None:
    rows = own_rows(year=[2001, 2002.5, "nan", 2004, 2005, 2006], sensor=[1, 2, 1, 2, 1, 2])
    domains = get_benchmark("place_folder").read(write_own(tmp_path, rows), metadata_columns=("sensor", "year"))
    north = by_name(domains)["train north"]
    assert north.metadata.dtype == np.float32
    np.testing.assert_array_equal(north.metadata, [[0.0, 0.0, 1.0, 2001.0], [20.0, -10.0, 1.0, np.nan]])
    assert read_place_folder(tmp_path)[0].metadata.shape == (2, 2)


@pytest.mark.parametrize("bad", ["2013-06-05", "", "inf", "1e39", "Sentinel-2"])
def test_a_column_that_is_not_numeric_is_named_by_file_and_line(tmp_path: Path, bad: str) -> None:
    rows = own_rows(time=[1, 2, 3, bad, 5, 6])
    with pytest.raises(DataError, match=r"metadata\.csv': column 'time' is .* in lines 5"):
        read_place_folder(write_own(tmp_path, rows), ("time",))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_without_a_split_groups_are_domains_under_the_table_s_own_names(tmp_path: Path, separator: str) -> None:
    table = write_own(tmp_path, own_rows()) / "metadata.csv"
    lines = [f"tiles/{row}.png;{'xy'[row % 2]};{'ba'[row // 3]};?" for row in range(6)]
    table.write_text("\n".join(["file;diagnosis;hospital;label", *lines]).replace(";", separator))
    names = {"path": "file", "label": "diagnosis", "group": "hospital"}
    first, second = get_benchmark("place_folder").read(tmp_path, columns=names)
    for domain, name in ((first, "a"), (second, "b")):
        assert (domain.name, domain.group, domain.role, domain.split) == (name, name, "train", None)
    assert first.classes == ("x", "y")
    assert (list(first.targets), gray_of(first, 0)) == ([1, 0, 1], 60)
    assert np.isnan(np.asarray(first.metadata)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata_columns": ("time",)}, r"metadata\.csv': .*columns time"),
        ({"columns": {"path": "datei"}}, "columns datei"),
        ({"columns": {"split": "part"}}, "columns part"),
        ({"columns": {"hospital": "group"}}, r"columns=\{'hospital': 'group'\}: hospital"),
        ({"data_dir": "nowhere"}, "data_dir='nowhere'"),
        ({"data_dir": None}, "data_dir=None"),
    ],
)
def test_columns_and_folders_that_are_not_there_are_refused(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(MoeDgError, match=message):
        read_place_folder(**{"data_dir": write_own(tmp_path, own_rows()), **options})
