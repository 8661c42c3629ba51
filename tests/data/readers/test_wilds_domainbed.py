"""Camelyon17 and FMoW in DomainBed's form, read from small copies of the releases' folders and tables."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data import get_benchmark, split_domain, split_domains
from timm_moe_dg.data.readers.wilds import HOSPITALS, REGIONS, read_camelyon, read_fmow_by_region
from timm_moe_dg.errors import DataError

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
def fmow(tmp_path):
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
def test_regions_are_domains_without_the_sequestered(fmow, name, names):
    domains = replace(get_benchmark(name), num_classes=2).read(fmow)
    assert tuple(domain.name for domain in domains) == names == get_benchmark(name).domains
    for position, domain in enumerate(domains):
        expected = [k for k in range(30) if k % 6 == position and k % 10 != 9]
        assert numbers(domain) == expected
        assert list(domain.targets) == [k % 2 for k in expected]
        np.testing.assert_array_equal(domain.metadata, [(-k, k) for k in expected])


def test_a_lacking_region_is_named(fmow):
    table = fmow / "fmow_v1.1" / "rgb_metadata.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line for line in lines if ",ATA," not in line))
    with pytest.raises(
        DataError, match="lacks Other; expected the domains Asia, Europe, Africa, Americas, Oceania, Ot"
    ):
        get_benchmark("WILDSFMoW").read(fmow)


def test_regions_are_split_as_other_domains(fmow):
    domains = read_fmow_by_region(fmow)
    splits = split_domains(domains, training=[], trial_seed=2)
    for position, split in enumerate(splits):
        np.testing.assert_array_equal(split.inside, split_domain(len(domains[position]), position, trial_seed=2).inside)


@pytest.mark.parametrize("name", ["WILDSCamelyon", "WILDSFMoW", "WILDSFMoW_five_regions"])
def test_no_folder(name):
    with pytest.raises(DataError, match="data_dir=None: give --data-dir"):
        get_benchmark(name).read(None)
