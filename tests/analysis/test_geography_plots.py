"""The map of discovered domains, its colors, outlines and names; expert usage."""

from itertools import combinations

import numpy as np
import pytest
import torch

from timm_moe_dg.analysis import geography_plots
from timm_moe_dg.analysis.geography import WORLD, DomainMap, ExpertUsage, cell_width, map_extent
from timm_moe_dg.analysis.geography_plots import FAR, coastlines, plot_domain_map, plot_expert_usage
from timm_moe_dg.analysis.style import LEGIBLE, NARROW, SHARED_COLOR, expert_color


@pytest.fixture
def drawn(figures, tmp_path):
    """Draws a map and returns its figure."""

    def draw(domains, *groups):
        plot_domain_map(domains, tmp_path / "a.png", *groups)
        return figures[-1]

    return draw


def hexed(color):
    return "#" + "".join(f"{round(255 * value):02X}" for value in color[:3])


def domains(experts, num_experts, **more):
    """A map of cells of any size."""
    height, width = np.shape(experts)
    centers = [torch.arange(-side + side / n, side, 2 * side / n) for side, n in ((180, width), (90, height))]
    return DomainMap(*centers, torch.as_tensor(experts), num_experts, **more)


def test_an_expert_has_its_color_on_the_map(drawn):
    experts = torch.tensor([[0, 3, 11], [3, 0, 11]])
    figure = drawn(DomainMap(torch.tensor([-90.0, 0.0, 90.0]), torch.tensor([-45.0, 45.0]), experts, 12))
    cells = figure.axes[0].collections[0]
    colors = [hexed(color) for color in cells.cmap(cells.norm(experts.flatten().numpy()))]
    assert colors == [expert_color(int(index)) for index in experts.flatten()]
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["expert 0", "expert 3", "expert 11"]
    assert [hexed(patch.get_facecolor()) for patch in legend.get_patches()] == [*map(expert_color, (0, 3, 11))]


def test_cells_far_from_training_are_pale_and_those_that_are_not_routed_white(drawn):
    distance = torch.tensor([[0.0, FAR - 1, FAR + 1], [5e3, 0.0, 9e3]])
    axes = drawn(domains([[0, 1, 1], [0, 1, -1]], 2, distance=distance, radius=8000.0)).axes[0]
    veil = axes.images[0].get_array()[..., 3]
    assert (veil > 0).tolist() == [[False, False, True], [True, False, False]]
    cells = axes.collections[0]
    assert hexed(cells.cmap(cells.norm(-1))) == SHARED_COLOR
    assert "pale: more than 1,000 km" in axes.get_title()
    assert "white: the shared expert alone, more than 8,000 km" in axes.get_title()
    assert "km" not in drawn(domains([[0, 1, 1]], 2)).axes[0].get_title()


def test_the_outline_surrounds_held_out_images_and_crosses_the_date_line(drawn):
    region = torch.tensor([[179.0, -10.0], [-179.0, -10.0], [179.0, 10.0], [-179.0, 10.0]])
    lines = drawn(domains(np.zeros((90, 180), int), 1), {}, {"Pacific": region}).axes[0].collections[1:]
    outline = np.concatenate([path.vertices for line in lines for path in line.get_paths()])
    assert len(outline) > 20
    from_line = 180.0 - np.abs(outline[:, 0])
    assert from_line.max() < 6.0
    assert set(np.sign(outline[:, 0])) == {-1.0, 1.0}
    assert 10.0 < np.abs(outline[:, 1]).max() < 16.0


def test_a_name_stands_above_a_northern_group_and_below_others_and_groups_without_places_have_none(drawn):
    places = {
        "north": torch.tensor([[0.0, 10.0], [10.0, 20.0]]),
        "south": torch.tensor([[0.0, -10.0], [10.0, -20.0]]),
        "nowhere": torch.full((2, 2), float("nan")),
        "date line": torch.tensor([[179.0, 10.0], [-177.0, 10.0]]),
    }
    axes = drawn(domains([[0, 0], [0, 0]], 1), places, {"there": torch.tensor([[90.0, 0.0]])}).axes[0]
    names = {text.get_text(): text for text in axes.texts}
    assert names.keys() == {"north", "south", "date line", "there (held out)"}
    for name, latitude, side in (("north", 19.8, "bottom"), ("south", -19.8, "top")):
        assert (names[name].xy, names[name].get_va()) == (pytest.approx((5.0, latitude)), side)
    axes.figure.draw_without_rendering()
    box, inside = names["date line"].get_window_extent(), axes.get_window_extent()
    assert inside.x0 - 1 <= box.x0 < inside.x0 + 1  # at 181 degrees, moved inside for its letters


@pytest.mark.parametrize("number", [1, 10, 16])
@pytest.mark.parametrize("span", [0.2, 8.0, 150.0])
def test_names_lie_in_the_map_apart_from_each_other_and_are_legible_on_a_phone_as_the_legend(drawn, number, span):
    centers = torch.tensor([[10.0 + span * (i % 4) / 4, 10.0 + span * (i // 4) / 10] for i in range(number)])
    places = {f"hospital of city {i}": center + torch.zeros(3, 2) for i, center in enumerate(centers)}
    extent = map_extent([*places.values()])
    sides = [torch.linspace(*side, 41)[1::2] for side in (extent[:2], extent[2:])]
    figure = drawn(DomainMap(*sides, torch.arange(400).view(20, 20) % number, number), places)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == number
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
    inside = figure.axes[0].get_window_extent().padded(1.0)
    assert all(inside.contains(*corner) for box in boxes for corner in (box.min, box.max))
    shown = NARROW / figure.bbox.width  # pixels of a narrow screen for one of the figure
    assert all(text.get_size() / 72 * figure.dpi * shown >= LEGIBLE - 1e-6 for text in figure.axes[0].texts)
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.width
    assert len(figure.legends[0].get_texts()) == number


def test_the_extent_shows_all_places_and_cells_follow_the_radius():
    places = torch.tensor([[10.0, 50.0], [30.0, 55.0], [float("nan"), 0.0]])
    extent = map_extent([places])
    assert extent == pytest.approx((8.0, 32.0, 46.5, 58.5))
    assert map_extent([places], radius=556.0).west == pytest.approx(4.5)  # 5.5 degrees of margin
    assert map_extent([places[2:]]) == WORLD == map_extent([torch.tensor([[-179.0, 0.0], [179.0, 0.0]])])
    assert map_extent([torch.tensor([[179.9, 89.9]])]) == pytest.approx((179.0, 180.0, 89.5, 90.0))
    assert cell_width(extent, None) == pytest.approx(24 / 180)
    for most in (None, 20.0):
        assert cell_width(WORLD, 181.0, most) * 111.2 < 181.0  # 20 degrees would draw an all-white map
    assert cell_width(WORLD, 1.0) == 0.5  # not a million cells


def test_coastlines_are_small_and_where_the_land_is():
    lines = coastlines()
    assert (geography_plots.Path(geography_plots.__file__).with_name("coastlines.npz")).stat().st_size < 100_000
    points = np.concatenate(lines)
    assert np.abs(points).max(0).tolist() <= [180.0, 90.0]
    assert max(np.abs(np.diff(line[:, 0])).max() for line in lines) < 20.0  # none leaps across the map
    for place in ((-5.6, 36.0), (-67.3, -55.9), (18.5, -34.1), (153.6, -28.6)):  # Gibraltar, Horn, Good Hope, Byron
        assert np.hypot(*(points - place).T).min() < 1.5


def test_an_expert_has_its_color_in_both_of_its_bars_and_panels_have_their_blocks(figures, tmp_path):
    shares = (torch.full((2, 3), share) for share in (1 / 3, 0.5, 1 / 3))
    plot_expert_usage(ExpertUsage(*shares, num_routed=6, num_images=6, blocks=(8, 10)), tmp_path / "a.png")
    bars = figures[0].axes[0].patches
    assert [hexed(bar.get_facecolor()) for bar in bars] == [expert_color(index) for index in (0, 1, 2, 0, 1, 2)]
    assert [bar.get_height() for bar in bars] == pytest.approx([1 / 3] * 3 + [0.5] * 3)
    assert [axes.get_title() for axes in figures[0].axes] == ["block 8", "block 10"]
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["largest weight", "among the selected", "even use"]
