"""Pictures of experts: each has its color of the palette."""

import pytest
import torch

from timm_moe_dg.analysis import ExpertUsage, geography_plots, style
from timm_moe_dg.analysis.style import expert_color

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture and returns its figure."""
    figures = []
    new_figure = style.new_figure
    monkeypatch.setattr(style, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])

    def draw(plot, found):
        plot(found, tmp_path / "a.png")
        return figures[-1]

    return draw


def hexed(color):
    return "#" + "".join(f"{round(255 * value):02X}" for value in color[:3])


def test_an_expert_has_its_color_in_both_of_its_bars(drawn):
    usage = ExpertUsage(*(torch.full((1, 3), share) for share in (1 / 3, 0.5, 1 / 3)), num_routed=6, num_images=6)
    bars = drawn(geography_plots.plot_expert_usage, usage).axes[0].patches
    assert [hexed(bar.get_facecolor()) for bar in bars] == [expert_color(index) for index in (0, 1, 2, 0, 1, 2)]
    assert [bar.get_height() for bar in bars] == pytest.approx([1 / 3] * 3 + [0.5] * 3)


def test_panels_are_named_by_their_blocks_and_the_legend_says_what_bars_are(drawn):
    shares = torch.full((2, 3), 1 / 3)
    usage = ExpertUsage(shares, shares, shares, num_routed=6, num_images=6, blocks=(8, 10))
    figure = drawn(geography_plots.plot_expert_usage, usage)
    assert [axes.get_title() for axes in figure.axes] == ["block 8", "block 10"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "largest weight",
        "among the selected",
        "even use",
    ]
