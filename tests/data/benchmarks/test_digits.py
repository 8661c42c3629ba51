"""Rows of digits against what reading them gives."""

import pytest

from timm_moe_dg.data import get_benchmark


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits"])
def test_digits_row_says_what_reading_gives(name):
    row = get_benchmark(name)
    domains = row.read(None)
    assert row.domains == tuple(domain.name for domain in domains)
    assert {row.classes} == {domain.classes for domain in domains}
    assert domains[0].image(0).size == (row.image_size, row.image_size)
