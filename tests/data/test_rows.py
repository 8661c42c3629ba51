"""The table of benchmarks: names, published figures, and the folders that are not confused."""

from dataclasses import replace

import pytest

from tests.data.copies import write_domains
from timm_moe_dg.algorithms.hparams import SEARCH_SPACES
from timm_moe_dg.data import AUGMENTATIONS, BENCHMARKS, Benchmark, benchmarks, get_benchmark, register_benchmark
from timm_moe_dg.data.benchmarks import PLACE_ROWS
from timm_moe_dg.errors import ArgumentError, DataError
from timm_moe_dg.results.papers import FIGURES


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


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits", "sprites"])
def test_a_row_without_files_has_the_domains_and_classes_that_are_read(name):
    row = get_benchmark(name)
    domains = row.read(None)
    assert row.domains == tuple(domain.name for domain in domains)
    assert {row.classes} == {domain.classes for domain in domains}
    assert domains[0].image(0).size == (row.image_size, row.image_size)
    assert domains[0].image(0).mode == "RGB"


def test_unknown_benchmark_lists_the_choices():
    with pytest.raises(ArgumentError, match=r"dataset='rotated_digit': choose from rotated_digits, colored_digits, "):
        get_benchmark("rotated_digit")


@pytest.fixture
def unregistered():
    """A row that is taken out of the table again."""
    row = Benchmark(name="toy", reader=lambda data_dir: [], source="none", license="CC0")
    yield row
    benchmarks._ROWS.pop("toy", None)


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
        ("emoji_styles", 5_682, 12),
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


@pytest.mark.parametrize("below", ["CUB_DG", "CUB-DG"])
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


def test_columns_of_the_papers_figures_are_domains_of_their_benchmarks():
    """The 40 of CUB-DG, and those of single-source training on DomainNet."""
    seen = {"CUB_DG": 0, "DomainNet": 0}
    for figure in FIGURES:
        row = BENCHMARKS[figure.dataset]
        if row.domains and figure.column != "average":
            assert figure.column in row.domains
            seen[figure.dataset] += 1
    assert seen == {"CUB_DG": 40, "DomainNet": 144}


def test_rows_of_one_data_set_read_it_in_different_ways():
    fmow = [row for row in PLACE_ROWS if "fmow" in row.source]
    assert len({row.name for row in fmow}) == len({str(row.reader) for row in fmow}) == len(fmow)
    assert {row.name: "does not compare" in row.source for row in fmow if row.domains} == {
        "WILDSFMoW": False,
        "WILDSFMoW_five_regions": True,
    }


def test_numbers_of_classes_that_gmoe_s_tables_6_and_7_state_are_compared_with_copies():
    names = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet", "SVIRO", "WILDSCamelyon", "WILDSFMoW")
    assert [BENCHMARKS[name].num_classes for name in names] == [7, 5, 65, 10, 345, 7, 2, 62]
