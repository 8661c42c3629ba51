"""Written pictures keep the experts' colors, although they have 256 of them."""

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.analysis.style import EXPERT_COLORS, new_figure, write_figure

pytest.importorskip("matplotlib")


def test_colors_of_experts_survive_beside_a_photograph(tmp_path):
    figure = new_figure(3, 2)
    photograph, *patches = figure.subplots(3, 6).flat
    photograph.imshow(np.random.default_rng(0).random((64, 64, 3)))
    for axes, color in zip(patches, EXPERT_COLORS, strict=False):
        axes.set_facecolor(color)
    write_figure(figure, tmp_path / "a.png")
    found = np.array(Image.open(tmp_path / "a.png").convert("RGB")).reshape(-1, 3).astype(int)
    for color in EXPERT_COLORS:
        wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
        assert abs(found - wanted).max(1).min() <= 12, color
