"""Location encoders: the harmonics against scipy, the networks by their numbers."""

import math

import numpy as np
import pytest
import torch
from scipy.special import sph_harm_y
from torch import Tensor

from timm_moe_dg.layers.encoders.location import (
    LocationEncoder,
    LocationIdEmbedding,
    SinCosEncoder,
    spherical_harmonics,
)

DEGREES = 41  # l = 0 .. 40


def coordinates() -> Tensor:
    """10,000 random points of the sphere, then the poles, the date line from both sides, and the origin."""
    random = np.random.default_rng(0)
    longitude = random.uniform(-180, 180, 10_000)
    latitude = np.degrees(np.arcsin(random.uniform(-1, 1, 10_000)))
    special = [(0, 90), (123, 90), (0, -90), (-77, -90), (180, 12), (-180, 12), (180, 90), (0, 0)]
    return torch.tensor(np.concatenate([np.stack([longitude, latitude], 1), np.array(special)]))


def scipy_harmonics(lonlat: Tensor, degrees: int) -> np.ndarray:
    """The real orthonormal harmonics from scipy's complex ones, times (-1)^m: without the Condon-Shortley phase."""
    phi, theta = np.radians(lonlat[:, 0].numpy() + 180), np.radians(lonlat[:, 1].numpy() + 90)
    columns = []
    for degree in range(degrees):
        waves = [sph_harm_y(degree, m, theta, phi) * (-1) ** m * math.sqrt(2) for m in range(1, degree + 1)]
        zonal = sph_harm_y(degree, 0, theta, phi).real
        columns += [*(wave.imag for wave in reversed(waves)), zonal, *(wave.real for wave in waves)]
    return np.stack(columns, 1)


@pytest.mark.slow
def test_harmonics_equal_scipys_up_to_degree_40() -> None:
    lonlat = coordinates()
    ours = spherical_harmonics(lonlat, DEGREES)
    assert ours.shape == (len(lonlat), DEGREES**2)
    assert ours.dtype == torch.float64
    assert np.abs(ours.numpy() - scipy_harmonics(lonlat, DEGREES)).max() < 1e-9


def test_first_harmonics_in_closed_form() -> None:
    lonlat = torch.tensor([[-90.0, 30.0]])  # phi = pi / 2, theta = 2 pi / 3
    theta = 2 * math.pi / 3
    scale = math.sqrt(3 / (4 * math.pi))
    expected = [math.sqrt(1 / (4 * math.pi)), scale * math.sin(theta), scale * math.cos(theta), 0.0]
    assert spherical_harmonics(lonlat, 2)[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_satclips_norm_differs_by_pi_on_the_zonal_terms_alone() -> None:
    lonlat = coordinates()[:200]
    plain, satclip = (spherical_harmonics(lonlat, 20, norm) for norm in ("orthonormal", "satclip"))
    zonal = torch.tensor([degree**2 + degree for degree in range(20)])
    others = torch.ones(400, dtype=torch.bool).scatter(0, zonal, False)
    assert torch.equal(satclip[:, zonal], plain[:, zonal] * math.pi)
    assert torch.equal(satclip[:, others], plain[:, others])


def test_gradients_equal_finite_differences_at_a_pole_too() -> None:
    lonlat = torch.tensor([[20.0, 40.0], [10.0, 90.0], [-180.0, -90.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda points: spherical_harmonics(points, 6), lonlat)


def test_the_encoder_has_the_papers_157440_parameters_and_its_bounds() -> None:
    encoder = LocationEncoder()
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 157_440
    assert encoder.first.weight.shape == (256, 100)
    assert 0.0095 < encoder.first.weight.abs().max() <= 1 / 100
    for layer in (encoder.hidden, encoder.last):
        assert 0.95 * math.sqrt(6 / 256) < layer.weight.abs().max() <= math.sqrt(6 / 256)


def test_the_encoder_is_a_siren_over_the_harmonics() -> None:
    encoder = LocationEncoder(out_features=5, hidden_features=7, degrees=3).double().eval()
    lonlat = coordinates()[:9]
    x = spherical_harmonics(lonlat, 3)
    x = torch.sin(30 * (x @ encoder.first.weight.T + encoder.first.bias))
    x = torch.sin(x @ encoder.hidden.weight.T + encoder.hidden.bias)
    torch.testing.assert_close(encoder(lonlat), x @ encoder.last.weight.T + encoder.last.bias)


def test_sincos_is_a_small_network_over_four_numbers() -> None:
    encoder = SinCosEncoder(out_features=3, hidden_features=8).double()
    lonlat = torch.tensor([[90.0, 30.0], [-45.0, -60.0]], dtype=torch.float64)
    half, root = 0.5, math.sqrt(0.5)
    angles = torch.tensor(
        [[1.0, half, 0.0, math.sqrt(0.75)], [-root, -math.sqrt(0.75), root, half]], dtype=torch.float64
    )
    hidden = torch.nn.functional.gelu(angles @ encoder.hidden.weight.T + encoder.hidden.bias)
    torch.testing.assert_close(encoder(lonlat), hidden @ encoder.last.weight.T + encoder.last.bias)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 4 * 8 + 8 + 8 * 3 + 3


def test_radians_are_warned_about_and_degrees_are_not(recwarn: pytest.WarningsRecorder) -> None:
    encoder, degrees = LocationEncoder(), coordinates()[:40]
    encoder.check(degrees)
    encoder.check(torch.zeros(40, 2))  # a placeholder rather than radians
    assert not recwarn
    with pytest.warns(UserWarning, match="radians"):
        encoder.check(torch.deg2rad(degrees))


def test_harmonics_are_orthonormal_on_the_sphere() -> None:
    # Gauss-Legendre in the sine of the latitude and equal steps in longitude integrate degree 2 * 9 exactly
    nodes, weights = np.polynomial.legendre.leggauss(12)
    longitude = np.arange(24) * 15.0 - 180
    grid = [(lon, lat) for lat in np.degrees(np.arcsin(nodes)) for lon in longitude]
    area = torch.tensor(np.repeat(weights, 24) * 2 * np.pi / 24)
    values = spherical_harmonics(torch.tensor(grid), 10)
    torch.testing.assert_close(values.T @ (values * area[:, None]), torch.eye(100, dtype=torch.float64))


def test_negative_ids_are_unknown() -> None:
    assert LocationIdEmbedding(5, 3).present(torch.tensor([0, -1, 4])).tolist() == [True, False, True]
