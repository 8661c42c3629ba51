"""Rows of places: WILDS's protocols and DomainBed's have names of their own, and say what is not comparable."""

from timm_moe_dg.data.benchmarks.place_rows import PLACE_ROWS
from timm_moe_dg.data.readers.wilds import HOSPITALS


def test_rows_of_one_data_set_read_it_in_different_ways():
    fmow = [row for row in PLACE_ROWS if "fmow" in row.source]
    assert len({row.name for row in fmow}) == len({str(row.reader) for row in fmow}) == len(fmow)
    assert {row.name: "not comparable" in row.source for row in fmow if row.domains} == {
        "WILDSFMoW": False,
        "WILDSFMoW_five_regions": True,
    }


def test_camelyon_has_the_published_number_of_patches():
    (row,) = [row for row in PLACE_ROWS if row.name == "WILDSCamelyon"]
    assert tuple(row.images) == tuple(HOSPITALS)
    assert sum(row.images.values()) == 455_954  # WILDS (Koh et al., 2021), 450,000 patches, rounded
