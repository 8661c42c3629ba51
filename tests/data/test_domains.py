"""The base of all domains: its optional parts, domains without some of their images, and spellings of names."""

import numpy as np
import pytest

from tests.data.files import Toy
from timm_moe_dg.data import Domain, PlacesDomain, Split, get_benchmark
from timm_moe_dg.data.domains import check_spellings
from timm_moe_dg.errors import DataError


def test_the_optional_parts_have_defaults_and_images_none():
    toy = Toy("photo", ("a",), [0, 0], [1, 2])
    assert (len(toy), toy.role, toy.group, toy.metadata, toy.split) == (2, "train", "photo", None, None)
    assert Toy("ood Asia", ("a",), [], [], role="ood", group="Asia").group == "Asia"
    with pytest.raises(TypeError, match="image"):
        Domain("photo", ("a",), [], [])


@pytest.mark.parametrize("gone", [set(), {0}, {1, 4, 6}, set(range(7))])
def test_without_keeps_all_columns_and_the_split_in_step(gone):
    split = Split(np.array([6, 0, 3, 1]), np.array([2, 5]))  # the image at 4 is in neither part
    metadata = np.arange(14.0).reshape(7, 2)
    toy = Toy("x", ("a", "b"), [0, 1, 0, 1, 1, 0, 1], list(range(10, 17)), metadata=metadata, split=split, role="id")
    fewer = toy.without(gone)
    remaining = [position for position in range(7) if position not in gone]
    assert type(fewer) is Toy
    assert (fewer.name, fewer.role, fewer.group, fewer.classes) == ("x", "id", "x", ("a", "b"))
    assert fewer.images == [10 + position for position in remaining]
    assert fewer.targets == [toy.targets[position] for position in remaining]
    np.testing.assert_array_equal(fewer.metadata, metadata[remaining])
    for part, before in ((fewer.split.inside, split.inside), (fewer.split.outside, split.outside)):
        assert [fewer.images[row] for row in part] == [10 + position for position in before if position not in gone]


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits", "geo_digits"])
def test_domains_in_memory_lose_images_as_others_do(name):
    for domain in get_benchmark(name).read(None):
        fewer = domain.without({*range(len(domain))} - {3})
        assert fewer.image(0).tobytes() == domain.image(3).tobytes()
        assert len(fewer) == 1
        assert isinstance(fewer, type(domain))
        assert isinstance(domain, PlacesDomain) == (domain.metadata is not None)


SEEN = [
    ("1", "1.0"),
    ("1", "01"),
    ("1e3", "1000"),
    ("cat", "cat "),
    ("-0", "0"),
    ("a\u200b", "a"),
    ("\u00e9", "e\u0301"),
]


@pytest.mark.parametrize(("first", "second"), [*SEEN, ("cat", "Cat"), ("a_b", "a b"), ("a-b", "a b")])
def test_names_that_differ_by_spelling_alone_are_refused_or_noticed_in_one_domain(first, second, caplog):
    with pytest.raises(DataError, match=r"classes .* in a, .* in b"):
        check_spellings("data", [(first, "a"), (second, "b")])
    together = [(first, "a"), (first, "b"), (second, "b")]
    if (first, second) in SEEN:  # which look the same
        with pytest.raises(DataError, match="groups"):
            check_spellings("data", together, "groups")
    else:
        check_spellings("data", together, "groups")
        assert "they count as different groups" in caplog.text


@pytest.mark.parametrize("names", [("1", "10"), ("C", "C++"), ("+1", "-1"), ("1.5", "15"), ("9" * 19, "9" * 18 + "8")])
def test_names_that_differ_by_more_are_different(names, caplog):
    check_spellings("data", [(name, "a") for name in names])
    assert not caplog.records
