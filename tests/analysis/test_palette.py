"""Sixteen colors that differ, also to eyes that lack a kind of cone."""

from itertools import combinations

import numpy as np
import pytest

from timm_moe_dg.analysis.style import EXPERT_COLORS, SHARED_COLOR, expert_color, model_colors

# Linear RGB as people without one kind of cone see it (Machado, Oliveira and Fernandes, 2009, severity 1)
SIMULATED = {
    "ordinary": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def linear(color):
    values = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eyes", SIMULATED)
def test_the_first_eight_are_told_apart(eyes):
    seen = [(np.array(SIMULATED[eyes]) @ linear(color)).clip(0, 1) ** (1 / 2.4) for color in EXPERT_COLORS[:8]]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.09


def test_each_expert_keeps_its_color():
    assert len({expert_color(index) for index in range(16)}) == 16
    assert expert_color(17) == expert_color(1)
    assert expert_color(-1) == SHARED_COLOR


def test_a_kind_of_model_has_one_color_and_rows_of_a_kind_have_different_ones():
    alone = {name: model_colors([name])[0] for name in ("gmoe_small_patch16", "sfmoe_small", "moge_tiny", "resnet50")}
    assert len(set(alone.values())) == 4
    assert model_colors(["gmoe_base_patch16"]) == [alone["gmoe_small_patch16"]]
    assert model_colors(["vit_small_patch16_224"]) == model_colors(["deit_small_patch16_224"])
    rows = ["moge_tiny", "gmoe_small_patch16", "gmoe_base_patch16", "gmoe_small_patch16", "moge_tiny"]
    found = model_colors(rows)
    assert len(set(found)) == 5
    assert found[:2] == [alone["moge_tiny"], alone["gmoe_small_patch16"]]
