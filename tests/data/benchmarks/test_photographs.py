"""Rows of photographs against what is published of them."""

import pytest

from tests.data.copies import write_domains
from timm_moe_dg.data import BENCHMARKS, get_benchmark
from timm_moe_dg.errors import DataError
from timm_moe_dg.results.paper_figures import FIGURES


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
