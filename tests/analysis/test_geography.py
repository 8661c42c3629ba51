"""Discovered domains and forced experts of a small MoGE model whose routing is known, and their pictures."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis import geography
from timm_moe_dg.analysis.geography import (
    FAR,
    WORLD,
    DomainMap,
    cell_width,
    coastlines,
    domain_map,
    domains_at,
    forced_expert_matrix,
    map_extent,
    plot_domain_map,
    plot_expert_matrix,
)
from timm_moe_dg.analysis.style import SHARED_COLOR, expert_color
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import GeoMoeMlp


class Hemispheres(nn.Module):
    """Encodes the quadrant of a place as a unit vector: 0 south-west, 1 south-east, 2 north-west, 3 north-east."""

    out_features = 4

    def forward(self, metadata: Tensor) -> Tensor:
        quadrant = (metadata[:, 0] > 0).long() + 2 * (metadata[:, 1] > 0).long()
        return nn.functional.one_hot(quadrant, 4).float()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 4}
    model = timm.create_model("moge_tiny", metadata_encoder=Hemispheres(), num_experts=4, top_k=2, **sizes)
    for layer in layers_of(model):  # the codes are the quadrants in reverse: quadrant q belongs to expert 3 - q
        nn.init.eye_(layer.router.codes)
        layer.router.codes.data = layer.router.codes.data.flip(0)
    return model.train()


def layers_of(model: nn.Module) -> list[GeoMoeMlp]:
    return [module for module in model.modules() if isinstance(module, GeoMoeMlp)]


PLACES = torch.tensor([[-50.0, -10.0], [50.0, -10.0], [-50.0, 10.0], [50.0, 10.0], [float("nan"), 0.0], [60.0, 20.0]])


def test_the_domain_of_a_place_is_its_best_expert(model: nn.Module) -> None:
    assert domains_at(model, PLACES).tolist() == [3, 2, 1, 0, -1, 0]
    assert model.training  # left as it was
    with pytest.raises(ArgumentError, match="MoGE"):
        domains_at(nn.Linear(2, 2), PLACES)


def test_the_map_has_longitude_across_and_latitude_up(model: nn.Module) -> None:
    domains = domain_map(model, [torch.tensor([[-179.0, 0.0], [179.0, 0.0]])])
    assert domains.experts.shape == (90, 180)
    assert domains.experts[0].tolist() == [3] * 90 + [2] * 90  # the south: west, then east
    assert domains.experts[-1].tolist() == [1] * 90 + [0] * 90
    assert (domains.extent, domains.num_experts) == (WORLD, 4)


def test_the_extent_shows_all_places_and_cells_follow_the_radius():
    places = torch.tensor([[10.0, 50.0], [30.0, 55.0], [float("nan"), 0.0]])
    extent = map_extent([places])
    assert extent == pytest.approx((8.0, 32.0, 46.5, 58.5))
    assert map_extent([places], radius=556.0).west == pytest.approx(4.5)  # 5.5 degrees of margin
    assert map_extent([places[2:]]) == WORLD == map_extent([torch.tensor([[-179.0, 0.0], [179.0, 0.0]])])
    assert map_extent([torch.tensor([[179.9, 89.9]])]) == pytest.approx((179.0, 180.0, 89.5, 90.0))
    assert cell_width(extent, None) == pytest.approx(24 / 180)
    assert cell_width(WORLD, 181.0) * 111.2 == pytest.approx(181.0 / 1.5)
    assert cell_width(WORLD, 1.0) == 1.0  # not a million cells


def test_the_forced_matrix_is_each_expert_on_each_domain(model: nn.Module) -> None:
    torch.manual_seed(1)
    images, target, places = torch.randn(40, 3, 16, 16), torch.randint(0, 4, (40,)), PLACES.repeat(7, 1)[:40]
    for layer in layers_of(model):
        layer.experts.fc2.weight.data.mul_(200)  # make the experts matter
    # The groups are not read
    batches = [(images[half], target[half], None, places[half]) for half in (slice(0, 15), slice(15, 40))]
    matrix = forced_expert_matrix(model, batches)
    domain = domains_at(model, places)
    model.eval()
    for expert in range(4):
        model.set_expert_mode(expert)
        with torch.no_grad():
            right = model(images, places).argmax(1) == target
        for row in range(4):
            assert matrix.accuracy[row, expert].item() == pytest.approx(right[domain == row].double().mean().item())
    assert matrix.num_samples.tolist() == [int((domain == row).sum()) for row in range(4)]
    assert matrix.accuracy.unique().numel() > 4  # the experts do differ
    model.set_expert_mode("routed")
    torch.testing.assert_close(forced_expert_matrix(model, batches), matrix)
    assert not any(layer.shared_only or layer.forced_expert is not None for layer in layers_of(model))


def test_a_domain_without_samples_has_no_accuracy(model, tmp_path) -> None:
    batch = (torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long), None, PLACES[:2])
    matrix = forced_expert_matrix(model, [batch])
    assert matrix.num_samples.tolist() == [0, 0, 1, 1]
    assert matrix.accuracy[:2].isnan().all()
    assert not matrix.accuracy[2:].isnan().any()
    plot_expert_matrix(matrix, tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")


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
    assert Path(geography.__file__).with_name("coastlines.npz").stat().st_size < 100_000
    points = np.concatenate(lines)
    assert np.abs(points).max(0).tolist() <= [180.0, 90.0]
    assert max(np.abs(np.diff(line[:, 0])).max() for line in lines) < 20.0  # none leaps across the map
    for place in ((-5.6, 36.0), (-67.3, -55.9), (18.5, -34.1), (153.6, -28.6)):  # Gibraltar, Horn, Good Hope, Byron
        assert np.hypot(*(points - place).T).min() < 1.5
