"""Confusion matrices: nothing is cut off, whatever the number of classes and the length of their names."""

import numpy as np
import pytest
import torch
from PIL import Image

from timm_moe_dg.analysis import score_plots
from timm_moe_dg.analysis.style import NARROW, picture, text_size

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a matrix and returns its figure."""
    figures = []

    class Kept:
        def __init__(self, *words, **options):
            self.inner = picture(*words, **options)

        def __enter__(self):
            figures.append(self.inner.__enter__())
            return figures[-1]

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    monkeypatch.setattr(score_plots, "picture", Kept)

    def draw(classes, title=""):
        score_plots.plot_confusion(torch.eye(len(classes), dtype=torch.long), classes, tmp_path / "a.png", title)
        return figures[-1]

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 10, 31])
@pytest.mark.parametrize("name", ["{}", "a class with a long name, number {} $x_{{"])
def test_no_label_is_cut_off(drawn, tmp_path, number, name):
    drawn([name.format(at) for at in range(number)], "model\nheld out: " + "a domain " * 20)
    pixels = np.asarray(Image.open(tmp_path / "a.png").convert("L"))
    assert all((edge == 255).all() for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]))


def test_the_title_says_of_what_and_of_how_many(drawn):
    title = drawn(["a", "b", "c"], "gmoe\nheld out: sketch").axes[0].get_title()
    assert title.splitlines() == ["gmoe", "held out: sketch", "3 images"]


@pytest.mark.parametrize("width", [7.0, 9.0, 11.0])
def test_text_is_eight_pixels_high_in_a_narrow_picture(width):
    assert text_size(width) / 72 * NARROW / width == pytest.approx(8)
