"""Colors that can be told apart, also by people with color blindness, and text that is legible in small pictures."""

from itertools import combinations

import numpy as np
import pytest

from timm_moe_dg.analysis.style import (
    EXPERT_COLORS,
    NARROW,
    SHARED_COLOR,
    expert_color,
    fitted,
    text_size,
)

# Linear RGB as people without one kind of cone see it (Machado, Oliveira and Fernandes, 2009, severity 1)
SIMULATED = {
    "ordinary": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def rgb(color):
    return np.array([*bytes.fromhex(color[1:])])


def linear(color):
    values = rgb(color) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", SIMULATED)
def test_the_first_eight_are_told_apart(eyes):
    seen = [(np.array(SIMULATED[eyes]) @ linear(color)).clip(0, 1) ** (1 / 2.4) for color in EXPERT_COLORS[:8]]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.09


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
