"""Rows against folders on disk: found under their names, compared with what was published, without duplicates."""

import logging

import pytest

from tests.data.copies import CLASSES, small, write_domains
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


def test_spellings_of_a_name_are_one(tmp_path):
    names = ("Art", "Clipart", "Product", "real_world")
    write_domains(tmp_path / "OfficeHome", names)
    domains = small("OfficeHome", num_classes=7).read(tmp_path)
    assert [domain.name for domain in domains] == list(names)


def test_missing_and_differently_named_domains_are_listed(tmp_path):
    write_domains(tmp_path, ("art_painting", "cartoon", "photos", "sketch"))
    with pytest.raises(DataError) as caught:
        get_benchmark("PACS").read(tmp_path)
    message = str(caught.value)
    assert "lacks photo and has photos" in message
    assert "expected the domains art_painting, cartoon, photo, sketch" in message
    assert "found art_painting, cartoon, photos, sketch" in message
    assert "PACS/DOMAIN/CLASS/IMAGE" in message


def test_a_folder_that_is_no_domain_is_not_taken_for_one(tmp_path):
    write_domains(tmp_path, (*PACS, "Train val splits"))
    with pytest.raises(DataError, match="the data folder has Train val splits; expected"):
        get_benchmark("PACS").read(tmp_path)


def test_a_folder_of_other_data_sets(tmp_path):
    write_domains(tmp_path / "VLCS", ("Caltech101",))
    with pytest.raises(DataError, match="expected the domains art_painting, cartoon, photo, sketch and found VLCS"):
        get_benchmark("PACS").read(tmp_path)


def test_another_number_of_classes(tmp_path):
    write_domains(tmp_path, PACS, CLASSES[:5])
    with pytest.raises(
        DataError, match=r"dataset='PACS': expected 7 classes and found 5 \(class_0, .*--dataset folder"
    ):
        get_benchmark("PACS").read(tmp_path)


def test_another_number_of_images_is_a_warning_with_both_numbers(tmp_path, caplog):
    write_domains(tmp_path, PACS)
    (tmp_path / "photo" / "class_0" / "photo_0.png").unlink()
    with caplog.at_level(logging.WARNING, "timm_moe_dg"):
        domains = small("PACS").read(tmp_path)
    assert len(domains[2]) == 13
    assert [record.getMessage() for record in caplog.records] == [
        "dataset='PACS': photo holds 13 images where 14 were published; results do not compare"
    ]


@pytest.mark.parametrize("data_dir", [None, "nowhere"])
@pytest.mark.parametrize("name", ["PACS", "DomainNet", "SVIRO"])
def test_no_folder(name, data_dir):
    with pytest.raises(DataError, match=rf"data_dir=.*{get_benchmark(name).aliases[0]}/DOMAIN/CLASS/IMAGE"):
        get_benchmark(name).read(data_dir)


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits", "geo_digits", "sprites", "hub:owner/name"])
def test_a_folder_that_would_be_ignored_is_refused(tmp_path, name):
    with pytest.raises(ArgumentError, match=rf"data_dir='{tmp_path}': {name} reads no folder; .* --dataset folder"):
        get_benchmark(name).read(tmp_path)
