"""The table of benchmarks: names, published figures, and the folders that are not confused."""

from dataclasses import replace

import pytest

from tests.data.files import write_domains
from timm_moe_dg.algorithms.hparams import SEARCH_SPACES
from timm_moe_dg.data import BENCHMARKS, Benchmark, benchmarks, get_benchmark, register_benchmark
from timm_moe_dg.data.transforms import AUGMENTATIONS
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
        if row.aliases:
            assert list(row.domains) == sorted(row.domains)  # as folders are listed


def test_evaluations_look_at_training_images_where_domainbed_has_the_data_and_in_papers_that_follow_it():
    domainbed = {"PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet", "SVIRO", "WILDSCamelyon", "WILDSFMoW"}
    mnist = {f"{how}{digits}" for how in ("Rotated", "Colored") for digits in ("MNIST", "FashionMNIST")}
    followers = {"CUB_DG", "CUB_DG_paintings", "WILDSFMoW_five_regions"}
    assert {name for name, row in BENCHMARKS.items() if row.eval_train} == domainbed | mnist | followers


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits"])
def test_a_row_without_files_has_the_domains_and_classes_that_are_read(name):
    row = get_benchmark(name)
    domains = row.read(None)
    assert row.domains == tuple(domain.name for domain in domains)
    assert {row.classes} == {domain.classes for domain in domains}
    assert domains[0].image(0).size == (row.image_size, row.image_size)
    assert domains[0].image(0).mode == "RGB"


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
    for changes in ({"source": "another"}, {"name": "PACS"}, {"name": ""}, {"name": "a/b"}, {"name": "hub:x"}):
        with pytest.raises(ArgumentError, match=r"name="):
            register_benchmark(replace(unregistered, **changes))
    for name in ("rotated_digit", "hub:"):
        with pytest.raises(ArgumentError, match=f"dataset='{name}'"):
            get_benchmark(name)


@pytest.mark.parametrize(
    ("name", "total", "classes", "numbers"),
    [
        ("PACS", 9_991, 7, (3e-5, 0.0, 5001, 300, 100)),
        ("VLCS", 10_729, 5, (3e-5, 1e-6, 5001, 300, 50)),
        ("OfficeHome", 15_588, 65, (1e-5, 1e-6, 5001, 300, 100)),
        ("TerraIncognita", 0, 10, (5e-5, 1e-4, 5001, 300, 100)),
        ("DomainNet", 586_575, 345, (5e-5, 0.0, 15001, 1000, 500)),
        ("SVIRO", 0, 7, (5e-5, 0.0, 5001, 300, 100)),
        ("CUB_DG", 47_152, 200, (5e-5, 0.0, 5001, 300, 100)),
        ("WILDSCamelyon", 455_954, 2, (5e-5, 0.0, 5001, 100, 100)),
        ("WILDSFMoW", 0, 62, (5e-5, 0.0, 5001, 100, 100)),
        ("emoji_styles", 5_682, 12, (1e-3, 0.0, 1501, 300, 100)),
        ("rotated_digits", 0, 10, (3e-4, 0.0, 501, 100, 100)),
        ("geo_digits", 0, 10, (1e-3, 0.0, 601, 200, 100)),
        ("blue_marble", 0, 5, (1e-3, 0.0, 601, 200, 100)),
        ("blue_marble_12", 0, 12, (1e-3, 0.0, 601, 200, 100)),
        ("FMoW_LAO", 0, None, (1e-4, 0.0, 60_001, 2000, 100)),
        ("iWildCam", 0, None, (3e-5, 0.0, 97_001, 5000, 100)),
        ("RotatedMNIST", 70_000, 10, (1e-3, 0.0, 5001, 100, 100)),
        ("ColoredFashionMNIST", 70_000, 2, (1e-3, 0.0, 5001, 100, 100)),
    ],
)
def test_images_classes_and_schedules_are_those_of_the_papers(name, total, classes, numbers):
    """GMoE's Tables 6 to 8: rate, weight decay, steps, steps between evaluations, and the same under SWAD."""
    row = BENCHMARKS[name]
    assert sum(row.images.values()) == total
    assert tuple(row.images) in ((), row.domains)
    assert row.num_classes == classes
    rates = (row.hparams["lr"], row.hparams["weight_decay"])
    assert (*rates, row.steps, row.checkpoint_freq, row.swad_checkpoint_freq) == numbers
    sizes = {16: "emoji rotat geo_d blue_ iWild", 64: "Rotat Color FMoW_"}
    assert row.hparams["batch_size"] == next((size for size, names in sizes.items() if name[:5] in names), 32)
    assert row.swad_hparams == ({"swad_tolerance_ratio": 0.2} if name == "VLCS" else {})


def test_the_two_cub_dgs_are_not_taken_for_one_another(tmp_path):
    classes = tuple(f"{number:03}.Bird" for number in range(1, 201))
    names = ("Candy", "Mosaic", "Natural", "Udnie"), ("Art", "Cartoon", "Paint", "Photo")
    rows = ("CUB_DG", "CUB_DG_paintings")
    for place, domains, row in zip(("a/CUB_DG", "b/CUB-DG"), names, rows, strict=True):
        root = write_domains(tmp_path / place, domains, classes, images=1).parent
        assert [domain.name for domain in get_benchmark(row).read(root)] == list(domains)
        with pytest.raises(DataError, match="dataset="):
            get_benchmark(rows[row == "CUB_DG"]).read(root)


def test_columns_of_the_papers_figures_are_domains_of_their_benchmarks():
    """The 40 of CUB-DG, and those of single-source training on DomainNet."""
    seen = {"CUB_DG": 0, "DomainNet": 0}
    for figure in FIGURES:
        row = BENCHMARKS[figure.dataset]
        if row.domains and figure.column != "average":
            assert figure.column in row.domains
            seen[figure.dataset] += 1
    assert seen == {"CUB_DG": 40, "DomainNet": 144}
