"""Colors of experts, and text that is legible in small pictures."""

import pytest

from timm_moe_dg.analysis.style import (
    NARROW,
    SHARED_COLOR,
    expert_color,
    fitted,
    text_size,
)


def test_each_expert_keeps_its_color():
    assert len({*map(expert_color, range(16))}) == 16
    assert (expert_color(17), expert_color(-1)) == (expert_color(1), SHARED_COLOR)


@pytest.mark.parametrize("width", [7.0, 9.0, 11.0])
def test_text_is_eight_pixels_high_in_a_narrow_picture(width):
    assert text_size(width) / 72 * NARROW / width == pytest.approx(8)


def test_names_are_wrapped():
    long = "a name that goes on and on, as those of folders and of classes of birds sometimes do in fact"
    assert all(len(line) <= 20 for line in fitted(long, 20).splitlines())
    assert (fitted("short", 20), fitted("", 20)) == ("short", " ")
    assert fitted("deit_tiny_patch16_224", 13) == "deit_tiny_\npatch16_224"
    assert fitted("two words_of a name", 13) == "two words_of\na name"
    assert fitted("_hidden", 20) == " _hidden"  # no legend leaves it out
