"""Colors that can be told apart, also by people with color blindness, and text that is legible in small pictures."""

from itertools import combinations

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.analysis.style import (
    EXPERT_COLORS,
    NARROW,
    SHARED_COLOR,
    expert_color,
    fitted,
    model_colors,
    small_picture,
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


def test_a_kind_of_model_has_one_color_and_rows_of_a_kind_have_different_ones():
    alone = {name: model_colors([name])[0] for name in ("gmoe_small_patch16", "sfmoe_small", "moge_tiny", "resnet50")}
    assert len(set(alone.values())) == 4
    assert model_colors(["gmoe_base_patch16"]) == [alone["gmoe_small_patch16"]]
    assert model_colors(["vit_small_patch16_224"]) == model_colors(["deit_small_patch16_224"])
    rows = ["moge_tiny", "gmoe_small_patch16", "gmoe_base_patch16", "gmoe_small_patch16", "moge_tiny"]
    colors = model_colors(rows)
    assert len(set(colors)) == 5
    assert colors[:2] == [alone["moge_tiny"], alone["gmoe_small_patch16"]]


def test_colors_of_experts_survive_beside_a_photograph(tmp_path):
    pytest.importorskip("matplotlib")
    with small_picture(tmp_path / "a.png", 3, 2) as figure:  # in 256 colors
        photograph, *patches = figure.subplots(3, 6).flat
        photograph.imshow(np.random.default_rng(0).random((64, 64, 3)))
        for axes, color in zip(patches, EXPERT_COLORS, strict=False):
            axes.set_facecolor(color)
    pixels = np.array(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3).astype(int)
    for color in EXPERT_COLORS:
        assert abs(pixels - rgb(color)).max(1).min() <= 12, color


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
