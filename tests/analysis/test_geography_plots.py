"""The map of discovered domains, its colors and names."""

import numpy as np
import torch

from timm_moe_dg.analysis import geography_plots
from timm_moe_dg.analysis.geography import WORLD, DomainMap
from timm_moe_dg.analysis.geography_plots import FAR, coastlines, plot_domain_map
from timm_moe_dg.analysis.style import SHARED_COLOR, expert_color


def hexed(color):
    return "#" + "".join(f"{round(255 * value):02X}" for value in color[:3])


def test_cells_have_their_experts_color_are_pale_far_from_training_and_white_without_routing(figures, tmp_path):
    distance = torch.tensor([[0.0, FAR - 1, FAR + 1], [5e3, 0.0, 9e3]])
    domains = DomainMap(WORLD, torch.tensor([[0, 3, 11], [3, 0, -1]]), 12, distance, radius=8000.0)
    places = {
        "north": torch.tensor([[90.0, 10.0], [100.0, 20.0]]),
        "nowhere": torch.full((2, 2), float("nan")),
        "date line": torch.tensor([[179.0, -20.0], [-177.0, -10.0]]),
    }
    plot_domain_map(domains, tmp_path / "a.png", places, {"there": torch.tensor([[-90.0, 0.0]])})
    axes = figures[0].axes[0]
    cells, veil = axes.images
    colors = [hexed(color) for color in cells.cmap(cells.norm(domains.experts.flatten().numpy()))]
    assert colors == [expert_color(int(index)) for index in domains.experts.flatten()]
    assert colors[-1] == SHARED_COLOR
    assert (veil.get_array()[..., 3] > 0).tolist() == [[False, False, True], [True, False, False]]
    assert cells.get_extent() == list(WORLD)
    assert cells.origin == "lower"
    assert "pale: more than 1,000 km" in axes.get_title()
    assert "white: the shared expert alone, more than 8,000 km" in axes.get_title()
    legend = figures[0].legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["expert 0", "expert 3", "expert 11"]
    assert [hexed(patch.get_facecolor()) for patch in legend.get_patches()] == [*map(expert_color, (0, 3, 11))]
    names = {text.get_text(): (text.xy, text.get_ha(), text.get_va()) for text in axes.texts}
    assert names.pop("there (held out)") == ((-90, 0), "left", "top")
    assert names == {"north": ((95, 10), "right", "top"), "date line": ((-179, -10), "left", "bottom")}


def test_coastlines_are_small_and_where_the_land_is():
    lines = coastlines()
    assert (geography_plots.Path(geography_plots.__file__).with_name("coastlines.npz")).stat().st_size < 100_000
    points = np.concatenate(lines)
    assert np.abs(points).max(0).tolist() <= [180.0, 90.0]
    assert max(np.abs(np.diff(line[:, 0])).max() for line in lines) < 20.0  # none leaps across the map
    for place in ((-5.6, 36.0), (-67.3, -55.9), (18.5, -34.1), (153.6, -28.6)):  # Gibraltar, Horn, Good Hope, Byron
        assert np.hypot(*(points - place).T).min() < 1.5
