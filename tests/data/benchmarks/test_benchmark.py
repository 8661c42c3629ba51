"""Rows against folders on disk: found under their names, compared with what was published, without duplicates."""

import logging

import pytest

from tests.data.copies import CLASSES, small, write_domains
from timm_moe_dg.data import BENCHMARKS, get_benchmark
from timm_moe_dg.errors import DataError
from timm_moe_dg.results.paper_figures import FIGURES

PACS = ("art_painting", "cartoon", "photo", "sketch")


def test_table_8_and_the_schedule_of_every_row():
    """Learning rate, weight decay, steps, steps between evaluations, and the same under SWAD, typed in again."""
    expected = {
        "PACS": (3e-5, 0.0, 5001, 300, 100),
        "VLCS": (3e-5, 1e-6, 5001, 300, 50),
        "OfficeHome": (1e-5, 1e-6, 5001, 300, 100),
        "TerraIncognita": (5e-5, 1e-4, 5001, 300, 100),
        "DomainNet": (5e-5, 0.0, 15001, 1000, 500),
        "SVIRO": (5e-5, 0.0, 5001, 300, 100),
        "CUB_DG": (5e-5, 0.0, 5001, 300, 100),
        "WILDSCamelyon": (5e-5, 0.0, 5001, 100, 100),
        "WILDSFMoW": (5e-5, 0.0, 5001, 100, 100),
    }
    for name, numbers in expected.items():
        row = BENCHMARKS[name]
        rates = (row.hparams["lr"], row.hparams["weight_decay"])
        assert (*rates, row.steps, row.checkpoint_freq, row.swad_checkpoint_freq) == numbers
        assert row.hparams["batch_size"] == 32
        assert row.swad_hparams == ({"swad_tolerance_ratio": 0.2} if name == "VLCS" else {})


@pytest.mark.parametrize(
    ("name", "total", "classes"),
    [
        ("PACS", 9_991, 7),
        ("VLCS", 10_729, 5),
        ("OfficeHome", 15_588, 65),
        ("DomainNet", 586_575, 345),
        ("WILDSCamelyon", 455_954, 2),
        ("CUB_DG", 47_152, 200),
    ],
)
def test_images_add_up_to_the_published_totals(name, total, classes):
    row = BENCHMARKS[name]
    assert sum(row.images.values()) == total
    assert tuple(row.images) == row.domains
    assert row.num_classes == classes


def test_domains_stand_in_the_order_of_sorted_folders():
    for row in BENCHMARKS.values():
        if row.aliases:
            assert list(row.domains) == sorted(row.domains)


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


CUB_CLASSES = tuple(f"{number:03}.Bird" for number in range(1, 201))


@pytest.mark.parametrize("below", ["", "CUB_DG", "CUB-DG"])
def test_the_papers_cub_dg_is_read(tmp_path, below):
    write_domains(tmp_path / below, ("Candy", "Mosaic", "Natural", "Udnie"), CUB_CLASSES, images=1)
    domains = get_benchmark("CUB_DG").read(tmp_path)
    assert [domain.name for domain in domains] == ["Candy", "Mosaic", "Natural", "Udnie"]
    assert {domain.classes for domain in domains} == {CUB_CLASSES}


def test_the_two_cub_dgs_are_not_taken_for_one_another(tmp_path):
    write_domains(tmp_path / "CUB-DG", ("Art", "Cartoon", "Paint", "Photo"), CUB_CLASSES, images=1)
    assert len(get_benchmark("CUB_DG_paintings").read(tmp_path)) == 4
    with pytest.raises(DataError, match="lacks Candy, Mosaic, Natural, Udnie and has CUB-DG"):
        get_benchmark("CUB_DG").read(tmp_path)


def test_three_of_four_domains_of_cub_dg(tmp_path):
    write_domains(tmp_path / "CUB_DG", ("Candy", "Natural", "Udnie"), CUB_CLASSES[:2], images=1)
    with pytest.raises(DataError, match="the data folder lacks Mosaic; expected the domains Candy, Mosaic") as caught:
        get_benchmark("CUB_DG").read(tmp_path)
    assert "rename or move folders" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_columns_of_the_papers_figures_are_domains_of_their_benchmarks():
    """The 40 of CUB-DG, and those of single-source training on DomainNet."""
    seen = {"CUB_DG": 0, "DomainNet": 0}
    for figure in FIGURES:
        row = BENCHMARKS[figure.dataset]
        if row.domains and figure.column != "average":
            assert figure.column in row.domains
            seen[figure.dataset] += 1
    assert seen == {"CUB_DG": 40, "DomainNet": 144}
