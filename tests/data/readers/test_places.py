"""Tables of places as domains: who is inside and outside, by role and group; what a table lacks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.files import by_name, gray_of, write_csv, write_image
from timm_moe_dg.data import Places, get_benchmark
from timm_moe_dg.data.readers.places import PARTS, domains_of, read_place_folder
from timm_moe_dg.errors import ArgumentError, DataError

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


def test_rows_go_to_the_domain_of_their_role_and_group():
    actual = [
        (domain.name, domain.role, domain.group, rows(domain, domain.split.inside), rows(domain, domain.split.outside))
        for domain in domains_of(table())
    ]
    assert actual == [
        ("train a", "train", "a", [4], [7]),
        ("train b", "train", "b", [0, 8], [1]),
        ("id a", "id", "a", [5], []),
        ("ood c", "ood", "c", [2], [6]),
    ]


def test_pooled_groups_are_trained_on_as_one_domain():
    first, *others = domains_of(table(), pooled=True)
    assert (first.name, first.group, rows(first, first.split.inside)) == ("train", "all", [0, 4, 8])
    assert [domain.name for domain in others] == ["id a", "ood c"]


def test_training_domains_that_are_not_the_groups():
    names = np.array(["m", "n", "n", "n", "n", "m", "m", "m", "o"])
    actual = [
        (domain.name, domain.group, rows(domain, domain.split.inside), rows(domain, domain.split.outside))
        for domain in domains_of(table(), training=names)
    ]
    assert actual == [
        ("train m", "m", [0], [7]),
        ("train n", "n", [4], [1]),
        ("train o", "o", [8], []),
        ("id a", "a", [5], []),
        ("ood c", "c", [2], [6]),
    ]


def test_a_group_called_all_does_not_take_in_the_others():
    first, second, *_ = domains_of(table(group=["all" if name == "a" else name for name in GROUP]))
    assert (first.group, rows(first, first.split.inside), rows(first, first.split.outside)) == ("all", [4], [7])
    assert (second.group, rows(second, second.split.inside)) == ("b", [0, 8])


@pytest.mark.parametrize("lacking", [("train",), ("id_val",), ("id_test", "ood_test")])
def test_a_table_with_nothing_to_train_validate_or_test_on(lacking):
    remaining = [row for row, part in enumerate(PART) if part not in lacking]
    with pytest.raises(DataError, match="needs images in train, in id_val, and in id_test or ood_test"):
        domains_of(table([PART[row] for row in remaining], [GROUP[row] for row in remaining]))
    assert set(PARTS) == set(PART) - {"none"}


def test_groups_are_taken_from_all_rows(caplog):
    part = [*PART, "ood_val", "id_val", "id_val"]
    domains = domains_of(table(part, [*GROUP, "d", "d", "e"]))
    assert [domain.name for domain in domains if domain.role == "train"] == ["train a", "train b"]
    assert "2 rows of split id_val are left out: their groups have no train row" in caplog.text
    domains = by_name(domains_of(table(part, [*GROUP, "d", "a", "b"])))
    assert sum(map(len, domains.values())) == len(part) - part.count("none")
    assert (rows(domains["ood d"], domains["ood d"].split.inside), rows(domains["ood d"], [0])) == ([], [9])


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


@pytest.mark.parametrize("label", ["Forest", "forest\u200b", "nan", "NaN"])
def test_labels_in_two_spellings_or_none_are_refused(tmp_path: Path, label: str) -> None:
    rows = own_rows()
    rows[4]["label"] = label
    with pytest.raises(DataError, match=r"by spelling alone|column 'label' is"):
        read_place_folder(write_own(tmp_path, rows))


def test_data_for_evaluation_need_no_training_rows(tmp_path: Path) -> None:
    rows = [*own_rows()[3:], {**own_rows()[0], "split": "id_val"}]
    domains = read_place_folder(write_own(tmp_path, rows), evaluating=True)
    assert [(domain.name, len(domain)) for domain in domains] == [("train north", 1), ("id south", 1), ("ood east", 2)]
    with pytest.raises(DataError, match="needs images in train"):
        read_place_folder(tmp_path)


def test_a_training_group_without_validation_images_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_place_folder(write_own(tmp_path, own_rows()))
    assert "groups without id_val rows, which no validation counts: south (1 images)" in caplog.text


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


def test_a_validation_group_without_training_rows_is_named(tmp_path: Path) -> None:
    rows = own_rows()
    rows[2]["group"] = "west"
    with pytest.raises(DataError, match=r"split='id_val': 1 rows of groups without a train row \(west\); give these"):
        read_place_folder(write_own(tmp_path, rows))


def test_an_image_with_two_rows_is_named_by_both_lines(tmp_path: Path) -> None:
    rows = own_rows()
    rows.append(rows[1] | {"path": "tiles/./0.png", "label": "city"})
    with pytest.raises(DataError, match=r"metadata\.csv': lines 2 and 8 have the same path '.*0\.png'; remove one"):
        read_place_folder(write_own(tmp_path, rows))


def test_missing_files_columns_and_splits_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_place_folder(tmp_path / "nowhere")
    rows = [{key: row[key] for key in ("path", "label", "split", "group")} for row in own_rows()]
    write_own(tmp_path, rows)
    with pytest.raises(DataError, match=r"tiles/0.png': has no georeference, and no coordinates in metadata.csv"):
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


NAMES = {"path": "file", "label": "diagnosis", "group": "hospital"}


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_without_a_split_groups_are_domains_under_the_table_s_own_names(tmp_path: Path, separator: str) -> None:
    table = write_own(tmp_path, own_rows()) / "metadata.csv"
    lines = [
        "file;diagnosis;hospital;label",
        *(f"tiles/{row}.png;{'xy'[row % 2]};{'ba'[row // 3]};?" for row in range(6)),
    ]
    table.write_text("\n".join(lines).replace(";", separator))
    domains = get_benchmark("place_folder").read(tmp_path, columns=NAMES)
    assert [(domain.name, domain.group, domain.role, domain.split) for domain in domains] == [
        ("a", "a", "train", None),
        ("b", "b", "train", None),
    ]
    assert domains[0].classes == ("x", "y")
    assert (list(domains[0].targets), gray_of(domains[0], 0)) == ([1, 0, 1], 60)
    assert np.isnan(np.asarray(domains[0].metadata)).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"path": "datei"}, r"lacks the columns datei; it has path, label, lon, lat, split, group"),
        ({"split": "part"}, r"lacks the columns part; it has"),
        ({"hospital": "group"}, r"columns=\{'hospital': 'group'\}: hospital is none of path, label, group, split, lon"),
    ],
)
def test_names_of_columns_that_are_not_there(tmp_path: Path, columns: dict[str, str], message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        read_place_folder(write_own(tmp_path, own_rows()), columns=columns)
    with pytest.raises(
        ArgumentError, match=r"columns=.*folder reads no columns of a table; use --dataset place_folder"
    ):
        get_benchmark("folder").read(tmp_path, columns=columns)
