"""Rows against folders on disk: found under their names, and compared with what was published."""

import pytest

from tests.data.files import CLASSES, small, write_domains
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError, DataError

PACS = ("art_painting", "cartoon", "photo", "sketch")


@pytest.mark.parametrize("below", ["", "PACS", "kfold"])
def test_domains_are_found_in_the_folder_or_below_an_alias(tmp_path, below, caplog):
    write_domains(tmp_path / below, PACS)
    domains = small("PACS").read(tmp_path)
    assert [domain.name for domain in domains] == list(PACS)
    assert [len(domain) for domain in domains] == [14] * 4
    assert not caplog.records


@pytest.mark.parametrize(
    ("below", "domains", "classes", "message"),
    [
        ("", ("art_painting", "cartoon", "photos", "sketch"), 7, "domains art_painting, cartoon, photos, sketch"),
        ("", (*PACS, "Train val splits"), 7, "domains Train val splits, art_painting"),
        ("VLCS", ("Caltech101",), 7, "domains VLCS"),
        ("", PACS, 5, r"7 classes and found 5 \(class_0, "),
    ],
)
def test_other_domains_and_classes_are_refused(tmp_path, below, domains, classes, message):
    write_domains(tmp_path / below, domains, CLASSES[:classes])
    with pytest.raises(DataError, match=rf"dataset='PACS'.*{message}"):
        get_benchmark("PACS").read(tmp_path)


def test_another_number_of_images_is_a_warning_with_both_numbers(tmp_path, caplog):
    write_domains(tmp_path, PACS)
    (tmp_path / "photo" / "class_0" / "photo_0.png").unlink()
    domains = small("PACS").read(tmp_path)
    assert len(domains[2]) == 13
    assert [record.getMessage() for record in caplog.records] == [
        "dataset='PACS': photo holds 13 images where 14 were published; results do not compare"
    ]


@pytest.mark.parametrize("data_dir", [None, "nowhere"])
@pytest.mark.parametrize("name", ["PACS", "DomainNet", "WILDSCamelyon", "WILDSFMoW", "RotatedMNIST", "folder", "FMoW"])
def test_a_missing_folder_is_refused(name, data_dir):
    with pytest.raises(DataError, match=r"data_dir="):
        get_benchmark(name).read(data_dir)


@pytest.mark.parametrize("name", ["rotated_digits", "geo_digits"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_dir": "data"}, "data_dir='data': .*--dataset folder"),
        ({"data_dir": None, "metadata_columns": ("time",)}, r"metadata_columns=\['time'\]: .*--dataset place_folder"),
        ({"data_dir": None, "columns": {"path": "file"}}, r"columns=.*--dataset place_folder"),
        ({"data_dir": None, "bands": 4}, "in_chans=4"),
        ({"data_dir": None, "bands": ("red", "nir")}, "bands="),
    ],
)
def test_options_that_would_be_ignored_are_refused(name, options, message):
    with pytest.raises(ArgumentError, match=message):
        get_benchmark(name).read(**options)
