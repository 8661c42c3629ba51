"""Domains of many bands: what their networks see, what it is normalized by, and which data sets have none."""

import numpy as np
import pytest
import torch

from tests.band_files import band_folder
from timm_moe_dg.data import Split, get_benchmark, training_transform
from timm_moe_dg.data.band_domains import band_statistics
from timm_moe_dg.errors import ArgumentError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return band_folder(tmp_path_factory.mktemp("bands") / "data", bands=5)


def test_pixels_have_all_bands_and_pictures_are_rgb(folder):
    domains = get_benchmark("place_folder").read(folder, in_chans=5)
    assert {domain.pixels(0).shape for domain in domains} == {(5, 16, 16)}
    assert domains[0].image(0).mode == "RGB"
    assert domains[0].without([0]).pixels(0).shape == (5, 16, 16)


def test_statistics_are_those_of_all_training_pixels(folder):
    domains = get_benchmark("place_folder").read(folder, in_chans=5)
    splits = [Split(np.array([0, 2]), np.array([1, 3])) for _ in domains]
    mean, std = band_statistics(domains, splits, [0, 1], workers=2)
    pixels = torch.stack([domains[at].pixels(position) for at in (0, 1) for position in (0, 2)]).double()
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std((0, 2, 3), correction=0))


def test_a_band_that_is_the_same_everywhere_is_not_divided_by_nothing(tmp_path):
    folder = band_folder(tmp_path / "data", bands=2, dtype=np.float32)
    domains = get_benchmark("place_folder").read(folder, in_chans=2)
    for domain in domains:
        object.__setattr__(domain, "pixels", lambda index: torch.full((2, 4, 4), 0.1))
    splits = [Split(np.arange(4), np.arange(0)) for _ in domains]
    assert band_statistics(domains, splits, [0], workers=1)[1] == [1.0, 1.0]


def test_training_changes_the_place_of_pixels_and_not_their_spectrum():
    """Every pixel has the same five values: whatever is cropped and mirrored, they stay; color jitter would not."""
    values = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    augment = training_transform("photograph", (8, 8), [0.0] * 5, [1.0] * 5)
    for _ in range(20):
        torch.testing.assert_close(
            augment(values.view(5, 1, 1).repeat(1, 12, 10)), values.view(5, 1, 1).repeat(1, 8, 8)
        )


def test_data_sets_that_are_no_files_have_three_bands():
    with pytest.raises(ArgumentError, match=r"in_chans=4: images of rotated_digits have 3 bands; .*place_folder"):
        get_benchmark("rotated_digits").read(None, in_chans=4)
