"""The table of benchmarks: rows that refer to things which exist."""

import pytest

from timm_moe_dg.data import AUGMENTATIONS, BENCHMARKS, get_benchmark
from timm_moe_dg.errors import ArgumentError, DataError
from timm_moe_dg.protocols import SEARCH_SPACES


def test_rows_refer_to_things_that_exist():
    assert {"rotated_digits", "folder"} <= set(BENCHMARKS)
    for name, row in BENCHMARKS.items():
        assert row.name == name
        assert row.augmentation in AUGMENTATIONS
        assert set(SEARCH_SPACES[row.search_space]) == set(row.hparams)
        assert row.source
        assert row.license


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits"])
def test_digits_row_says_what_reading_gives(name):
    row = get_benchmark(name)
    domains = row.read(None)
    assert row.domains == tuple(domain.name for domain in domains)
    assert {row.classes} == {domain.classes for domain in domains}
    assert domains[0].image(0).size == (row.image_size, row.image_size)


def test_unknown_benchmark_lists_the_choices():
    with pytest.raises(ArgumentError, match=r"dataset='rotated_digit': choose from rotated_digits, colored_digits, "):
        get_benchmark("rotated_digit")


def test_folder_without_a_folder():
    with pytest.raises(DataError, match="--data-dir"):
        get_benchmark("folder").read(None)
