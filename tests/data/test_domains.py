"""The base of all domains: its optional parts, and domains without some of their images."""

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data import Domain, PlacesDomain, Split, get_benchmark


class Toy(Domain[int]):
    """Images that are numbers."""

    def image(self, index):
        return Image.new("RGB", (1, 1), (self.images[index],) * 3)


def test_the_optional_parts_have_defaults():
    toy = Toy("photo", ("a",), [0, 0], [1, 2])
    assert (len(toy), toy.role, toy.group, toy.metadata, toy.split) == (2, "train", "photo", None, None)
    assert Toy("ood Asia", ("a",), [], [], role="ood", group="Asia").group == "Asia"


def test_a_domain_says_how_an_image_is_read():
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
    assert (fewer.name, fewer.role, fewer.group) == ("x", "id", "x")
    assert fewer.images == [10 + position for position in remaining]
    assert fewer.targets == [toy.targets[position] for position in remaining]
    np.testing.assert_array_equal(fewer.metadata, metadata[remaining])
    for part, before in ((fewer.split.inside, split.inside), (fewer.split.outside, split.outside)):
        assert [fewer.images[row] for row in part] == [10 + position for position in before if position not in gone]


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits", "geo_digits"])
def test_domains_of_digits_lose_images_as_others_do(name):
    for domain in get_benchmark(name).read(None):
        fewer = domain.without(range(1, len(domain)))
        assert fewer.image(0).tobytes() == domain.image(0).tobytes()
        assert len(fewer) == 1
        assert isinstance(fewer, type(domain))
        assert isinstance(domain, PlacesDomain) == (domain.metadata is not None)
