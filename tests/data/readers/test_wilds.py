"""WILDS releases, on miniatures with the public columns and folder names."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.files import by_name, gray_of, write_csv, write_image
from timm_moe_dg.data import PlacesDomain, get_benchmark, split_domains
from timm_moe_dg.data.readers.wilds import (
    HOSPITALS,
    REGIONS,
    read_camelyon,
    read_fmow,
    read_fmow_by_region,
    read_fmow_lao,
    read_iwildcam,
)
from timm_moe_dg.errors import DataError, ImageReadError

# --- FMoW: (release split, year, country, latitude, longitude); the row number is the image's number and gray level
FMOW_ROWS = [
    ("train", 2004, "DEU", 48.1, 11.5),
    ("seq", 2004, "DEU", 48.2, 11.6),  # sequestered: keeps its place in the count of images
    ("train", 2012, "KEN", -1.3, 36.8),
    ("train", 2014, "KEN", -1.4, 36.9),  # too late for training
    ("train", 2010, "XKX", 42.6, 21.1),  # not in the country table: no region
    ("val", 2009, "DEU", 50.0, 8.0),
    ("val", 2013, "KEN", 0.5, 35.0),
    ("val", 2016, "KEN", 0.6, 35.1),  # a validation image of the test years is not used
    ("test", 2012, "JPN", 35.6, 139.7),
    ("test", 2016, "KEN", -4.0, 39.6),
    ("test", 2017, "XKX", 42.7, 21.2),
    ("test", 2015, "KEN", -4.1, 39.7),  # between the test periods
    ("train", 2011, "JPN", 34.6, 135.5),
    ("val", 2010, "JPN", 33.5, 130.4),
    ("test", 2017, "JPN", 43.0, 141.3),
    ("train", 2014, "USA", 38.9, -77.0),
    ("train", 2014, "FJI", -18.1, 178.4),
]
COUNTRIES = {"JPN": "Asia", "DEU": "Europe", "KEN": "Africa", "USA": "Americas", "FJI": "Oceania", "ATA": ""}
CATEGORIES = ["zoo", "airport", "lake_or_pond"]


def write_countries(folder: Path, countries: dict[str, str]) -> None:
    rows = [{"alpha-2": "XX", "alpha-3": code, "region": region} for code, region in countries.items()]
    write_csv(folder / "fmow_v1.1" / "country_code_mapping.csv", rows)


@pytest.fixture
def fmow(tmp_path: Path) -> Path:
    rows = []
    for row, (split, year, country, lat, lon) in enumerate(FMOW_ROWS):
        time = f"{year}-05-04T09:11:33Z"
        rows.append({"split": split, "category": CATEGORIES[row % 3], "country_code": country, "timestamp": time})
        rows[-1] |= {"lat": lat, "lon": lon, "region": "Europe"}
        write_image(tmp_path / "fmow_v1.1" / "images" / f"rgb_img_{row}.png", gray=10 * row)
    write_csv(tmp_path / "fmow_v1.1" / "rgb_metadata.csv", rows)
    write_countries(tmp_path, COUNTRIES)
    return tmp_path


def rows_of(domain: PlacesDomain, part: Iterable[int]) -> list[int]:
    """Row numbers of the csv, read back from the pixels, after checking label and coordinates against the csv."""
    rows = [gray_of(domain, index) // 10 for index in part]
    for row, index in zip(rows, part, strict=True):
        assert domain.classes[domain.targets[index]] == CATEGORIES[row % 3]
        assert domain.metadata[index].tolist() == pytest.approx([FMOW_ROWS[row][4], FMOW_ROWS[row][3]])
    return rows


OOD = {"ood Africa": ([9], [6]), "ood Asia": ([14], [])}


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (read_fmow, {"train": ([0, 2, 4, 12], [5, 13]), "id Asia": ([8], []), **OOD, "ood Other": ([10], [])}),
        # No training on images without a region
        (
            partial(read_fmow, pooled=False),
            {"train Africa": ([2], []), "train Asia": ([12], [13]), "train Europe": ([0], [5]), "id Asia": ([8], [])}
            | OOD,
        ),
        # All of Asia is held out: selection on its images would be an oracle
        (read_fmow_lao, {"train": ([0, 2, 4], [5]), "ood Asia": ([8, 14], [])}),
        (
            get_benchmark("FMoW_LAO_regions").read,
            {"train Africa": ([2], []), "train Europe": ([0], [5]), "ood Asia": ([8, 14], [])},
        ),
    ],
)
def test_fmow_has_the_official_split_with_images_labels_and_coordinates_aligned(
    fmow: Path, reader: Any, expected: dict[str, tuple[list[int], list[int]]]
) -> None:
    domains = by_name(reader(fmow))
    assert list(domains) == list(expected)
    for name, splits in expected.items():
        split = domains[name].split
        assert (rows_of(domains[name], split.inside), rows_of(domains[name], split.outside)) == splits
        assert set(domains[name].classes) == set(CATEGORIES)
    assert [domain.name for domain in reader(fmow / "fmow_v1.1")] == list(expected)


@pytest.mark.parametrize(("name", "names"), [("WILDSFMoW", (*REGIONS, "Other")), ("WILDSFMoW_five_regions", REGIONS)])
def test_regions_are_domains_without_the_sequestered(fmow: Path, name: str, names: tuple[str, ...]) -> None:
    domains = replace(get_benchmark(name), num_classes=3).read(fmow)
    assert tuple(domain.name for domain in domains) == names == get_benchmark(name).domains
    region_of = [COUNTRIES.get(country, "Other") if split != "seq" else None for split, _, country, *_ in FMOW_ROWS]
    for domain in domains:
        expected = [row for row, region in enumerate(region_of) if region == domain.name]
        assert rows_of(domain, range(len(domain))) == expected


@pytest.mark.parametrize("regions", [{"DEU": "", "KEN": " "}, {"DEU": "Europe", "KEN": "Atlantis"}])
def test_a_table_of_other_regions_and_a_missing_image_are_named(fmow: Path, regions: dict[str, str]) -> None:
    (fmow / "fmow_v1.1" / "images" / "rgb_img_0.png").unlink()
    with pytest.raises(ImageReadError, match=r"rgb_img_0\.png"):
        read_fmow(fmow)[0].image(0)
    write_countries(fmow, regions)
    for reader in (read_fmow, read_fmow_lao, read_fmow_by_region):
        with pytest.raises(DataError, match=r"country_code_mapping\.csv"):
            reader(fmow)


# --- iWildCam: (split, y, location)
CAMERA_ROWS = [("train", 0, 3), ("train", 2, 1), ("id_val", 0, 3), ("id_test", 1, 1), ("val", 1, 0), ("test", 2, 2)]


@pytest.fixture
def iwildcam(tmp_path: Path) -> Path:
    root, rows = tmp_path / "iwildcam_v2.0", []
    for row, (split, y, place) in enumerate(CAMERA_ROWS):
        rows.append({"": row, "split": split, "location_remapped": place, "y": y, "filename": f"image{row}.jpg"})
        write_image(root / "train" / f"image{row}.jpg", gray=30 * row)
    write_csv(root / "metadata.csv", rows)
    names = [(99999, "start"), (0, "empty"), (1, "puma concolor"), (2, "cuniculus paca")]
    write_csv(root / "categories.csv", [{"y": y, "category_id": 0, "name": name} for y, name in names])
    return tmp_path


def grays(domain: PlacesDomain) -> Any:
    return pytest.approx([gray_of(domain, index) for index in range(len(domain))], abs=2)


def test_iwildcam_has_location_ids_and_unseen_traps_are_unknown(iwildcam: Path) -> None:
    domains = by_name(read_iwildcam(iwildcam))
    assert list(domains) == ["train", "id", "ood"]
    train, ood = domains["train"], domains["ood"]
    assert train.classes == ("empty", "puma concolor", "cuniculus paca")
    assert [train.targets[index] for index in train.split.inside] == [0, 2]
    assert train.metadata.dtype == np.int64
    assert train.metadata.tolist() == [3, 1, 3]
    assert domains["id"].metadata.tolist() == [1]
    assert ood.metadata.tolist() == [-1, -1]
    assert [ood.targets[index] for index in (*ood.split.inside, *ood.split.outside)] == [2, 1]
    assert grays(train) == [0, 30, 60]


def test_camera_traps_as_domains(iwildcam: Path) -> None:
    domains = by_name(get_benchmark("iWildCam_locations").read(iwildcam))
    assert list(domains) == ["train location_001", "train location_003", "id", "ood"]
    first, third = domains["train location_001"], domains["train location_003"]
    assert (first.split.inside.tolist(), first.split.outside.tolist()) == ([0], [])
    assert (grays(first), grays(third)) == ([30], [0, 60])
    assert (third.split.inside.tolist(), third.split.outside.tolist()) == ([0], [1])
    assert [domain.metadata.tolist() for domain in domains.values()] == [[1], [3, 3], [1], [-1, -1]]
    splits = split_domains(list(domains.values()), [0, 1], trial_seed=0)
    assert [len(split.outside) for split in splits] == [0, 1, 0, 1]  # trained on without validation images


# --- Camelyon17: patch k is of hospital k % 5 and has the gray level k
@pytest.fixture
def camelyon(tmp_path: Path) -> Path:
    root, rows = tmp_path / "camelyon17_v1.0", []
    for k in range(20):
        row = {"patient": f"{k % 7:03}", "node": k % 3, "x_coord": 10 * k, "y_coord": k}
        rows.append(row | {"tumor": k // 10, "center": k % 5})
        slide = "patient_{patient}_node_{node}".format(**row)
        write_image(root / "patches" / slide / f"patch_{slide}_x_{10 * k}_y_{k}.png", gray=k)
    write_csv(root / "metadata.csv", rows)
    return tmp_path


@pytest.mark.parametrize("below", ["", "camelyon17_v1.0"])
def test_hospitals_are_domains_in_the_order_of_the_table(camelyon: Path, below: str) -> None:
    domains = read_camelyon(camelyon / below)
    assert tuple(domain.name for domain in domains) == HOSPITALS
    for center, domain in enumerate(domains):
        members = [k for k in range(20) if k % 5 == center]
        assert [gray_of(domain, index) for index in range(4)] == members
        assert list(domain.targets) == [k // 10 for k in members]
        assert domain.classes == ("normal", "tumor")


@pytest.mark.parametrize(
    ("name", "table", "old", "new", "message"),
    [
        ("iWildCam", "iwildcam_v2.0/metadata.csv", "image2.jpg", "../image2.jpg", "'filename' .*lines 4"),
        ("iWildCam", "iwildcam_v2.0/categories.csv", "1,0,puma concolor\n2,0,cuniculus paca", "", r"class \[1, 2\]"),
        ("WILDSCamelyon", "camelyon17_v1.0/metadata.csv", "004,1,40,4,0,4", "004,1,40,4,0,5", "'center' .*lines 6"),
    ],
)
def test_a_wrong_table_is_refused(
    iwildcam: Path, camelyon: Path, name: str, table: str, old: str, new: str, message: str
) -> None:
    text = (camelyon / table).read_bytes().decode().replace("\r\n", "\n")
    assert old in text
    (camelyon / table).write_text(text.replace(old, new))
    with pytest.raises(DataError, match=message):
        get_benchmark(name).read(camelyon)
