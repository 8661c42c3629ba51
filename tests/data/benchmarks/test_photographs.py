"""Rows of photographs against what is published of them."""

import pytest

from timm_moe_dg.data import BENCHMARKS


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
