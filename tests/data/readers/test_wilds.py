"""WILDS releases, on miniatures with the public columns and folder names."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.data.readers.files import by_name, gray_of, write_csv, write_image
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
]


@pytest.fixture
def fmow(tmp_path: Path) -> Path:
    root = tmp_path / "fmow_v1.1"
    write_csv(
        root / "rgb_metadata.csv",
        [
            {
                "split": split,
                "img_filename": f"airport_{row}_0_rgb.jpg",
                "img_path": f"{split}/airport/airport_{row}/airport_{row}_0_rgb.jpg",
                "spatial_reference": "4326",
                "epsg": "4326",
                "category": ["zoo", "airport", "lake_or_pond"][row % 3],
                "visible": "True",
                "img_width": 900,
                "img_height": 800,
                "country_code": country,
                "cloud_cover": 3,
                "timestamp": f"{year}-05-04T09:11:33Z",
                "lat": lat,
                "lon": lon,
                "region": "Europe",
            }
            for row, (split, year, country, lat, lon) in enumerate(FMOW_ROWS)
        ],
    )
    countries = [("Germany", "DEU", "Europe"), ("Kenya", "KEN", "Africa"), ("Japan", "JPN", "Asia")]
    write_csv(
        root / "country_code_mapping.csv",
        [{"name": name, "alpha-2": "XX", "alpha-3": code, "region": region} for name, code, region in countries],
    )
    for row in range(len(FMOW_ROWS)):
        write_image(root / "images" / f"rgb_img_{row}.png", gray=10 * row)
    return tmp_path


def rows_of(domain: PlacesDomain, part: np.ndarray) -> list[int]:
    """Row numbers of the csv, read back from the pixels, after checking label and coordinates against the csv."""
    rows = [gray_of(domain, index) // 10 for index in part]
    for row, index in zip(rows, part, strict=True):
        assert domain.classes[domain.targets[index]] == ["zoo", "airport", "lake_or_pond"][row % 3]
        assert domain.metadata[index].tolist() == pytest.approx([FMOW_ROWS[row][4], FMOW_ROWS[row][3]])
    return rows


def test_fmow_has_the_official_split_with_images_labels_and_coordinates_aligned(fmow: Path) -> None:
    domains = by_name(read_fmow(fmow))
    assert list(domains) == ["train", "id Asia", "ood Africa", "ood Asia", "ood Other"]
    assert domains["train"].classes == ("airport", "lake_or_pond", "zoo")
    assert rows_of(domains["train"], domains["train"].split.inside) == [0, 2, 4, 12]
    assert rows_of(domains["train"], domains["train"].split.outside) == [5, 13]
    assert rows_of(domains["id Asia"], domains["id Asia"].split.inside) == [8]
    assert rows_of(domains["ood Africa"], domains["ood Africa"].split.inside) == [9]
    assert rows_of(domains["ood Africa"], domains["ood Africa"].split.outside) == [6]
    assert rows_of(domains["ood Other"], domains["ood Other"].split.inside) == [10]
    assert len(read_fmow(fmow / "fmow_v1.1")) == len(domains)


def test_fmow_by_region_trains_on_no_image_without_one(fmow: Path) -> None:
    domains = by_name(read_fmow(fmow, pooled=False))
    assert [name for name in domains if name.startswith("train")] == ["train Africa", "train Asia", "train Europe"]
    assert rows_of(domains["train Africa"], domains["train Africa"].split.inside) == [2]
    assert "ood Other" not in domains


def test_fmow_lao_holds_all_of_asia_out(fmow: Path) -> None:
    domains = by_name(read_fmow_lao(fmow))
    assert list(domains) == ["train", "ood Asia"]
    assert rows_of(domains["train"], domains["train"].split.inside) == [0, 2, 4]
    assert rows_of(domains["train"], domains["train"].split.outside) == [5]
    assert rows_of(domains["ood Asia"], domains["ood Asia"].split.inside) == [8, 14]
    assert len(domains["ood Asia"].split.outside) == 0  # selection on images of Asia would be an oracle


def test_fmow_lao_by_region_trains_on_each_other_region_and_on_no_image_without_one(fmow: Path) -> None:
    domains = by_name(list(get_benchmark("FMoW_LAO_regions").read(fmow)))
    assert list(domains) == ["train Africa", "train Europe", "ood Asia"]
    assert rows_of(domains["train Africa"], domains["train Africa"].split.inside) == [2]
    assert rows_of(domains["train Europe"], domains["train Europe"].split.inside) == [0]
    assert rows_of(domains["train Europe"], domains["train Europe"].split.outside) == [5]
    assert rows_of(domains["ood Asia"], domains["ood Asia"].split.inside) == [8, 14]


@pytest.mark.parametrize("reader", [read_fmow, read_fmow_lao, read_fmow_by_region])
@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (("", " "), r"country_code_mapping\.csv': no row has a region; give the release's table"),
        (("Europe", "Atlantis"), r"country_code_mapping\.csv': line 3 has the region 'Atlantis'; give one of"),
    ],
)
def test_a_table_of_regions_without_regions_is_named(fmow: Path, reader: Any, regions: Any, message: str) -> None:
    rows = [{"alpha-3": code, "region": region} for code, region in zip(("DEU", "KEN"), regions, strict=True)]
    write_csv(fmow / "fmow_v1.1" / "country_code_mapping.csv", rows)
    with pytest.raises(DataError, match=message):
        reader(fmow)


# --- iWildCam: (split, y, location)
CAMERA_ROWS = [("train", 0, 3), ("train", 2, 1), ("id_val", 0, 3), ("id_test", 1, 1), ("val", 1, 0), ("test", 2, 2)]


@pytest.fixture
def iwildcam(tmp_path: Path) -> Path:
    root = tmp_path / "iwildcam_v2.0"
    write_csv(
        root / "metadata.csv",
        [
            {
                "": row,
                "split": split,
                "location_remapped": location,
                "location": 100 + location,
                "sequence_remapped": row,
                "seq_id": f"seq{row}",
                "y": y,
                "category_id": 300 + y,
                "datetime": "2013-06-05 05:44:19.000",
                "filename": f"image{row}.jpg",
                "image_id": f"image{row}",
            }
            for row, (split, y, location) in enumerate(CAMERA_ROWS)
        ],
    )
    names = [(99999, "start"), (0, "empty"), (1, "puma concolor"), (2, "cuniculus paca")]
    write_csv(root / "categories.csv", [{"y": y, "category_id": 0, "name": name} for y, name in names])
    for row in range(len(CAMERA_ROWS)):
        write_image(root / "train" / f"image{row}.jpg", gray=30 * row)
    return tmp_path


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
    assert [gray_of(train, index) for index in range(3)] == pytest.approx([0, 30, 60], abs=2)


def test_camera_traps_as_domains(iwildcam: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = get_benchmark("iWildCam_locations")
    with caplog.at_level(logging.WARNING, "timm_moe_dg"):
        domains = by_name(list(row.read(iwildcam)))
    assert list(domains) == ["train location_001", "train location_003", "id", "ood"]
    first, third = domains["train location_001"], domains["train location_003"]
    assert (first.split.inside.tolist(), first.split.outside.tolist()) == ([0], [])
    assert [gray_of(first, index) for index in range(len(first))] == pytest.approx([30], abs=2)
    assert [gray_of(third, index) for index in range(len(third))] == pytest.approx([0, 60], abs=2)
    assert (third.split.inside.tolist(), third.split.outside.tolist()) == ([0], [1])
    assert third.metadata.tolist() == [3, 3]
    assert [domains[name].metadata.tolist() for name in ("id", "ood")] == [[1], [-1, -1]]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "metadata.csv': 2 locations have a single training image (lines 2, 3), which is drawn again" in message
    assert "mark these rows with another split to leave them out" in message


def test_a_trap_without_validation_images_is_trained_on_nevertheless(iwildcam: Path) -> None:
    domains = get_benchmark("iWildCam_locations").read(iwildcam)
    splits = split_domains(domains, [0, 1], trial_seed=0)
    assert [len(split.outside) for split in splits] == [0, 1, 0, 1]


def test_a_step_draws_as_many_traps_and_images_as_in_wilds() -> None:
    """WILDS: 16 images of 2 groups a batch, and so 8 of each; 12 epochs of 129,809 images."""
    row = get_benchmark("iWildCam_locations")
    assert (row.domains_per_step, row.hparams["batch_size"], row.hparams["lr"]) == (2, 8, 3e-5)
    assert row.steps * 16 == pytest.approx(12 * 129_809, rel=0.01)


def test_a_table_without_class_names_is_refused(iwildcam: Path) -> None:
    write_csv(iwildcam / "iwildcam_v2.0" / "categories.csv", [{"y": 0, "category_id": 0, "name": "empty"}])
    with pytest.raises(DataError, match=r"names no class \[1, 2\]"):
        read_iwildcam(iwildcam)


def test_a_missing_folder_and_a_missing_image_are_named(fmow: Path) -> None:
    with pytest.raises(DataError, match="--data-dir"):
        read_fmow(None)
    (fmow / "fmow_v1.1" / "images" / "rgb_img_0.png").unlink()
    train = by_name(read_fmow(fmow))["train"]
    with pytest.raises(ImageReadError, match=r"rgb_img_0\.png"):
        train.image(0)


def test_no_file_name_leads_out_of_the_release(iwildcam: Path) -> None:
    table = iwildcam / "iwildcam_v2.0" / "metadata.csv"
    table.write_text(table.read_text().replace("image2.jpg", "../image2.jpg"))
    with pytest.raises(DataError, match=r"column 'filename' is \['\.\./image2\.jpg'\] in lines 4"):
        read_iwildcam(iwildcam)


COUNTRIES = {"JPN": "Asia", "FRA": "Europe", "KEN": "Africa", "USA": "Americas", "FJI": "Oceania", "ATA": ""}


@pytest.fixture
def camelyon(tmp_path):
    """Twenty patches; patch k is of hospital k % 5 and has k in its red channel."""
    root = tmp_path / "camelyon17_v1.0"
    lines = [",patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for k in range(20):
        folder = root / "patches" / f"patient_{k % 7:03}_node_{k % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"patch_patient_{k % 7:03}_node_{k % 3}_x_{10 * k}_y_{k}.png"
        Image.new("RGB", (6, 6), (k, 0, 0)).save(file)
        lines.append(f"{k},{k % 7:03},{k % 3},{10 * k},{k},{k // 10},0,{k % 5},0")
    (root / "metadata.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def fmow_of_six(tmp_path):
    """Thirty images in the order of the table; every tenth is sequestered, every sixth of no region."""
    root = tmp_path / "fmow_v1.1"
    (root / "images").mkdir(parents=True)
    mapping = ["alpha-3,region", *(f"{code},{region}" for code, region in COUNTRIES.items())]
    (root / "country_code_mapping.csv").write_text("\n".join(mapping))
    lines = ["category,split,timestamp,country_code,lat,lon"]
    for k in range(30):
        split = "seq" if k % 10 == 9 else ("train", "val", "test")[k % 3]
        code = list(COUNTRIES)[k % 6]
        lines.append(f"{('airport', 'zoo')[k % 2]},{split},{2003 + k % 14}-01-01T00:00:00Z,{code},{k},{-k}")
        Image.new("RGB", (6, 6), (k, 0, 0)).save(root / "images" / f"rgb_img_{k}.png")
    (root / "rgb_metadata.csv").write_text("\n".join(lines))
    return tmp_path


def numbers(domain):
    return [domain.image(index).getpixel((0, 0))[0] for index in range(len(domain))]


@pytest.mark.parametrize("below", ["", "camelyon17_v1.0"])
def test_hospitals_are_domains_in_the_order_of_the_table(camelyon, below):
    domains = read_camelyon(camelyon / below)
    assert tuple(domain.name for domain in domains) == HOSPITALS
    for center, domain in enumerate(domains):
        assert numbers(domain) == [k for k in range(20) if k % 5 == center]
        assert list(domain.targets) == [k // 10 for k in range(20) if k % 5 == center]
        assert domain.classes == ("normal", "tumor")


def test_a_lacking_hospital_is_named(camelyon):
    table = camelyon / "camelyon17_v1.0" / "metadata.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line for line in lines if not line.endswith(",3,0")))
    with pytest.raises(DataError, match="lacks hospital_3; expected"):
        get_benchmark("WILDSCamelyon").read(camelyon)


def test_a_field_out_of_range_is_named_by_line(camelyon):
    table = camelyon / "camelyon17_v1.0" / "metadata.csv"
    table.write_text(table.read_text().replace("\n4,004,1,40,4,0,0,4,0", "\n4,004,1,40,4,0,0,5,0"))
    with pytest.raises(DataError, match=r"column 'center' is \['5'\] in lines 6"):
        read_camelyon(camelyon)


@pytest.mark.parametrize(("name", "names"), [("WILDSFMoW", (*REGIONS, "Other")), ("WILDSFMoW_five_regions", REGIONS)])
def test_regions_are_domains_without_the_sequestered(fmow_of_six, name, names):
    domains = replace(get_benchmark(name), num_classes=2).read(fmow_of_six)
    assert tuple(domain.name for domain in domains) == names == get_benchmark(name).domains
    for position, domain in enumerate(domains):
        expected = [k for k in range(30) if k % 6 == position and k % 10 != 9]
        assert numbers(domain) == expected
        assert list(domain.targets) == [k % 2 for k in expected]
        np.testing.assert_array_equal(domain.metadata, [(-k, k) for k in expected])


@pytest.mark.parametrize("name", ["WILDSCamelyon", "WILDSFMoW", "WILDSFMoW_five_regions"])
def test_no_folder(name):
    with pytest.raises(DataError, match="data_dir=None: give --data-dir"):
        get_benchmark(name).read(None)
