"""Pictures are written for any number of experts and names, and show what they are given."""

import numpy as np
import pytest
import torch

from timm_moe_dg.analysis.routing.map_plots import (
    Photograph,
    plot_association,
    plot_attention_maps,
    plot_entropy_maps,
    plot_expert_maps,
    plot_nulls,
)
from timm_moe_dg.analysis.routing.parts import associate_parts
from timm_moe_dg.analysis.style import expert_color

pytest.importorskip("matplotlib")
LONG = "a name that goes on and on, as those of folders and of classes of birds sometimes do in fact"


def photo(values, side=24):
    return Photograph("picture.png", np.full((side, side, 3), 200, np.uint8), values)


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [1, 10, 16])
def test_maps_of_any_number_of_experts(num_experts, tmp_path):
    first = torch.arange(64).view(8, 8) % num_experts
    rows = [("paper", [photo(first), None]), (LONG, [photo(first.T), photo(first)])]
    plot_expert_maps(rows, num_experts, tmp_path / "experts.png")
    plot_entropy_maps(rows, num_experts, tmp_path / "entropy.png")
    assert all(is_picture(tmp_path / f"{name}.png") for name in ("experts", "entropy"))


def test_cells_have_the_experts_color_and_number(figures, tmp_path):
    first = torch.tensor([[0, 3], [5, 1]])
    plot_expert_maps([("a", [photo(first)])], 6, tmp_path / "experts.png")
    (figure,) = figures
    overlay = figure.axes[0].images[1].get_array()
    for (row, column), index in np.ndenumerate(first.numpy()):
        hexed = "#" + "".join(f"{round(255 * value):02X}" for value in overlay[row, column, :3])
        assert hexed == expert_color(int(index))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0", "3", "5", "1"]
    assert [text.get_position() for text in figure.axes[0].texts] == [(6, 6), (18, 6), (6, 18), (18, 18)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [f"expert {index}" for index in (0, 1, 3, 5)]


def test_parts_are_marked_and_joined_along_a_row(figures, tmp_path):
    first = torch.zeros(2, 2, dtype=torch.long)
    places = [{"head": (0.25, 0.5), "tail": (1.0, 0.0)}, {}, {"head": (0.75, 0.25)}]
    photos = [Photograph("picture.png", np.zeros((24, 48, 3), np.uint8), first, parts) for parts in places]
    plot_expert_maps([("a", photos)], 6, tmp_path / "experts.png")
    (figure,) = figures
    marks = [[(*line.get_xdata(), *line.get_ydata()) for line in axes.lines] for axes in figure.axes]
    assert marks == [[(12, 12), (48, 0)], [], [(36, 6)]]
    (line,) = figure.artists
    assert (line.xy1, line.xy2, line.axesA, line.axesB) == ((12, 12), (36, 6), figure.axes[0], figure.axes[2])
    assert not any(axes.texts for axes in figure.axes)  # numbers would hide the marks
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["expert 0", "head", "tail"]


def test_small_cells_have_no_number_and_an_image_as_a_whole_is_one_cell(figures, tmp_path):
    plot_expert_maps([("a", [photo(torch.zeros(24, 24, dtype=torch.long))])], 2, tmp_path / "experts.png")
    rows = [("a", [photo(torch.tensor([[4]])), photo(torch.tensor([[-1]]))])]
    plot_expert_maps(rows, 6, tmp_path / "experts.png")
    small, whole = figures
    assert not small.axes[0].texts
    assert [[text.get_text() for text in axes.texts] for axes in whole.axes] == [["4"], ["shared"]]
    assert whole.legends[0].get_title().get_text().startswith("first expert of each image")


def test_attention_of_networks_with_different_heads(tmp_path):
    rows = [("dense", [photo(torch.rand(3, 4, 4))]), ("mixture", [photo(torch.rand(1, 4, 4))])]
    plot_attention_maps(rows, tmp_path / "attention.png")
    assert is_picture(tmp_path / "attention.png")


@pytest.mark.parametrize("num_experts", [1, 10, 16])
def test_tables_with_empty_rows(num_experts, tmp_path):
    members = torch.zeros(2, 3, 8, dtype=torch.bool)
    members[:, 0, :4] = members[:, 1, 4:] = True  # the third part is nowhere
    first = torch.arange(16).view(2, 8) % num_experts
    parts = associate_parts(members, ("left eye", LONG, "right eye"), first, num_experts, 9)
    plot_association(parts, LONG, tmp_path / "table.png")
    plot_nulls({LONG: parts.nmi, "b": parts.nmi}, "NMI", tmp_path / "nulls.png", {"b": 0.5})
    assert all(is_picture(tmp_path / f"{name}.png") for name in ("table", "nulls"))
