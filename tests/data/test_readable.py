"""Images that cannot be decoded are left out, and named; what can be read stays as it is."""

import logging

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data import Domain, Split, check_readable, drop_unreadable
from timm_moe_dg.errors import DataError, ImageReadError


class Toy(Domain[int]):
    """Negative numbers cannot be read."""

    def image(self, index):
        if self.images[index] < 0:
            raise ImageReadError(f"image={self.images[index]}")
        return Image.new("RGB", (1, 1))


def test_only_what_cannot_be_read_is_left_out(caplog):
    whole = Toy("whole", ("a",), [0, 0], [1, 2])
    torn = Toy("torn", ("a", "b"), [0, 1, 0, 1], [3, -4, 5, -6], split=Split(np.array([3, 2, 1]), np.array([0])))
    with caplog.at_level(logging.INFO, "timm_moe_dg"):
        domains, complaints = drop_unreadable([whole, torn], workers=3)
    assert domains[0] is whole
    assert (domains[1].images, domains[1].targets) == ([3, 5], [0, 0])
    assert (domains[1].split.inside.tolist(), domains[1].split.outside.tolist()) == ([1], [0])
    assert complaints == ["image=-4", "image=-6"]
    assert "2 unreadable images left out: image=-4; image=-6" in caplog.text


def test_many_are_counted_and_few_named(caplog):
    drop_unreadable([Toy("torn", ("a",), [0] * 9, [-1, -2, -3, -4, -5, -6, -7, -8, 9])])
    assert "8 unreadable images left out: image=-1; image=-2; image=-3; image=-4; image=-5; and 3 more" in caplog.text


def test_a_domain_of_which_nothing_is_left_is_an_error():
    with pytest.raises(DataError, match="domain='torn': none of its 2 images can be read; image=-1"):
        drop_unreadable([Toy("whole", ("a",), [0], [1]), Toy("torn", ("a",), [0, 0], [-1, -2])])


def test_a_check_counts_all_and_names_the_first(caplog):
    whole = Toy("whole", ("a",), [0], [1])
    with caplog.at_level(logging.INFO, "timm_moe_dg"):
        check_readable([whole])
    assert "all images can be read" in caplog.text
    with pytest.raises(
        DataError,
        match=r"images: 7 of 9 \(7 no extension\) cannot be read: image=-1; .*; image=-5; and 2 more; repair .* --skip",
    ):
        check_readable([whole, Toy("torn", ("a",), [0] * 8, [-1, -2, -3, -4, -5, -6, -7, 8])], workers=3)
