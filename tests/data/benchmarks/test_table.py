"""The table of benchmarks: rows that refer to things which exist."""

from dataclasses import replace

import pytest

from timm_moe_dg.data import AUGMENTATIONS, BENCHMARKS, Benchmark, get_benchmark, register_benchmark
from timm_moe_dg.data.benchmarks import table
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


def test_evaluations_look_at_training_images_where_domainbed_has_the_data_and_in_papers_that_follow_it():
    domainbed = {"PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet", "SVIRO", "WILDSCamelyon", "WILDSFMoW"}
    mnist = {f"{how}{digits}" for how in ("Rotated", "Colored") for digits in ("MNIST", "FashionMNIST")}
    followers = {"CUB_DG", "CUB_DG_paintings", "WILDSFMoW_five_regions"}
    assert {name for name, row in BENCHMARKS.items() if row.eval_train} == domainbed | mnist | followers


def test_unknown_benchmark_lists_the_choices():
    with pytest.raises(ArgumentError, match=r"dataset='rotated_digit': choose from rotated_digits, colored_digits, "):
        get_benchmark("rotated_digit")


@pytest.fixture
def unregistered():
    """A row that is taken out of the table again."""
    row = Benchmark(name="toy", reader=lambda data_dir: [], source="none", license="CC0")
    yield row
    table._ROWS.pop("toy", None)


def test_a_registered_row_is_found_and_its_name_is_taken(unregistered):
    assert register_benchmark(unregistered) is unregistered
    assert get_benchmark("toy") is BENCHMARKS["toy"] is unregistered
    assert register_benchmark(unregistered) is unregistered  # a module may be imported again
    with pytest.raises(ArgumentError, match="name='toy': is the name of another benchmark"):
        register_benchmark(replace(unregistered, source="another"))
    with pytest.raises(ArgumentError, match="name='PACS': is the name of another benchmark"):
        register_benchmark(replace(unregistered, name="PACS"))


@pytest.mark.parametrize("name", ["", "a/b", "hub:x", "a\\b"])
def test_a_name_that_no_run_folder_can_have(unregistered, name):
    with pytest.raises(ArgumentError, match=r"name=.*: give a name without slashes and colons"):
        register_benchmark(replace(unregistered, name=name))
    assert name not in BENCHMARKS


def test_folder_without_a_folder():
    with pytest.raises(DataError, match="--data-dir"):
        get_benchmark("folder").read(None)
