"""The index of training coordinates: distances on the sphere, the bound of thinning, and who is covered."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from timm_moe_dg.layers.encoders.coverage import (
    EARTH_RADIUS,
    MAX_POINTS,
    Coverage,
    cell_centers,
    distances,
    thin_coordinates,
)
from timm_moe_dg.layers.encoders.metadata import MetadataEncoder

METER = 1e-3
DEGREE = math.pi / 180 * EARTH_RADIUS


def haversine(first: Tensor, second: Tensor) -> np.ndarray:
    """(B, 2) and (P, 2) degrees -> (B, P) km, by the half-angle formula in float64."""
    lon, lat = (np.radians(first.double().numpy()[:, None, axis]) for axis in (0, 1))
    lon0, lat0 = (np.radians(second.double().numpy()[None, :, axis]) for axis in (0, 1))
    half = np.sin((lat - lat0) / 2) ** 2 + np.cos(lat) * np.cos(lat0) * np.sin((lon - lon0) / 2) ** 2
    return 2 * EARTH_RADIUS * np.arcsin(np.sqrt(half.clip(0, 1)))


def index(*points: tuple[float, float], radius: float | None = None) -> Coverage:
    return Coverage(len(points), radius).hold(torch.tensor(points, dtype=torch.float64))


def scattered(number: int, seed: int = 0) -> Tensor:
    """Coordinates all over the globe, poles and the date line among them."""
    random = torch.Generator().manual_seed(seed)
    places = (torch.rand(number, 2, generator=random, dtype=torch.float64) - 0.5) * torch.tensor([360.0, 180.0])
    special = torch.tensor([[180.0, 0.0], [-180.0, 0.0], [0.0, 90.0], [77.0, 90.0], [0.0, -90.0], [179.9, 66.0]])
    return torch.cat([special.double(), places])


def test_distances_are_great_circles_to_the_nearest_point():
    points, places = scattered(50, seed=1), scattered(3000)
    kilometers = distances(Coverage(len(points)).hold(points), places)
    assert kilometers.dtype == torch.float64
    np.testing.assert_allclose(kilometers.numpy(), haversine(places, points).min(1), rtol=0, atol=METER)


@pytest.mark.parametrize(
    ("place", "point", "degrees"),
    [
        ((179.5, 0.0), (-179.5, 0.0), 1.0),  # over the date line
        ((180.0, 10.0), (-180.0, 10.0), 0.0),
        ((10.0, 89.0), (-170.0, 89.0), 2.0),  # over the pole
        ((123.0, 90.0), (-45.0, 90.0), 0.0),  # a pole has all longitudes
        ((0.0, -90.0), (50.0, 0.0), 90.0),
        ((20.0, 30.0), (-160.0, -30.0), 180.0),  # the antipode
    ],
)
def test_distances_over_the_poles_and_the_date_line(place, point, degrees):
    assert index(point).distance(torch.tensor([place])).item() == pytest.approx(degrees * DEGREE, abs=METER)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_leaves_the_points_as_they_are(dtype):
    places = scattered(20)
    module = nn.ModuleList([Coverage(len(places)).hold(places)])
    before = module[0].distance(places)
    assert torch.equal(module.to(dtype)[0].distance(places), before)
    assert before.max() < METER


@given(st.integers(1, 400), st.floats(0.1, 60.0), st.integers(0, 10_000))
def test_every_coordinate_is_near_its_cells_center(number, size, seed):
    places = scattered(number, seed)
    # Its haversine has at most sin^2(size / 4) of latitude and (size / 4)^2 of longitude: no cell is wider than high
    quarter = math.radians(size) / 4
    largest = 2 * EARTH_RADIUS * math.asin(math.sqrt(min(1, math.sin(quarter) ** 2 + quarter**2)))
    assert haversine(places, cell_centers(places, size)).min(1).max() <= largest


@pytest.mark.parametrize("max_points", [2, 50, 1000])
def test_thinning_keeps_both_bounds(max_points):
    places = scattered(3000)
    points = thin_coordinates(places, max_points)
    assert len(points) <= max_points
    # Fewer points are the centers of larger cells
    assert haversine(places, points).min(1).max() <= {2: 20_000, 50: 5000, 1000: 700}[max_points]


def test_few_coordinates_are_kept_finely_and_without_repetition():
    places = scattered(100).repeat(5, 1)
    points = thin_coordinates(torch.cat([places, torch.tensor([[math.nan, 0.0]])]))
    assert len(points) <= 106 < MAX_POINTS
    assert haversine(places, points).min(1).max() < 20.0


def test_a_radius_covers_what_lies_within_it_and_none_covers_everything():
    places = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 3.0], [180.0, 0.0]])
    assert index((0.0, 0.0), radius=2 * DEGREE)(places).tolist() == [True, True, False, False]
    assert index((0.0, 0.0), radius=0.0)(places).tolist() == [True, False, False, False]
    assert index((0.0, 0.0))(places).all()


def test_what_is_not_covered_counts_as_absent_in_evaluation_alone():
    encoder = MetadataEncoder(nn.Linear(2, 4), 4)
    encoder.coverage = index((0.0, 0.0), radius=500.0)
    places = torch.tensor([[1.0, 1.0], [50.0, 0.0], [math.nan, 0.0]])
    images = torch.zeros(3, 1)
    assert encoder.train()(images, places)[1].tolist() == [True, True, False]
    embedding, present = encoder.eval()(images, places)
    assert present.tolist() == [True, False, False]
    assert torch.equal(embedding, encoder.train()(images, places)[0])
