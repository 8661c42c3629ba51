"""Colored digits: a label that is mostly the shape's, and a color that is mostly the label's, until it is not."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from timm_moe_dg.data.readers import colored_digits


@pytest.fixture(scope="module")
def domains():
    return colored_digits.colored_digits()


def greens(domain):
    """Whether each digit is green; every digit has ink in exactly one of the first two channels."""
    has_ink = domain.images.any(axis=(1, 2))
    np.testing.assert_array_equal(has_ink.sum(axis=1), 1)
    assert not has_ink[:, 2].any()
    return has_ink[:, 1]


def shapes_below_five():
    """Each enlarged digit's pixels -> whether it is below 5."""
    digits = load_digits()
    grey = np.rint(digits.images * 255 / 16).astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC)) for image in grey]
    return {image.tobytes(): target < 5 for image, target in zip(large, digits.target, strict=True)}


def test_three_domains_share_out_every_digit(domains):
    assert [domain.name for domain in domains] == ["+90%", "+80%", "-90%"]
    assert [len(domain) for domain in domains] == [599, 599, 599]
    found = Counter(image.max(axis=2).tobytes() for domain in domains for image in domain.images)
    assert set(found) == set(shapes_below_five())
    assert found.total() == 1797


def test_a_quarter_of_the_labels_is_flipped(domains):
    below_five = shapes_below_five()
    for domain in domains:
        shape = np.array([below_five[image.max(axis=2).tobytes()] for image in domain.images])
        agreement = (shape == np.array(domain.targets)).mean()
        assert abs(agreement - 0.75) < 4 * np.sqrt(0.25 * 0.75 / 599)


@pytest.mark.parametrize(("position", "agreement"), [(0, 0.9), (1, 0.8), (2, 0.1)])
def test_the_color_follows_the_flipped_label_as_the_name_says(domains, position, agreement):
    found = (greens(domains[position]) == np.array(domains[position].targets)).mean()
    assert abs(found - agreement) < 4 * np.sqrt(agreement * (1 - agreement) / 599)


def test_the_two_kinds_of_noise_are_independent(domains):
    """Given the label, the color says nothing about the shape: no correlation within a label beyond chance."""
    below_five = shapes_below_five()
    for domain in domains:
        shape = np.array([below_five[image.max(axis=2).tobytes()] for image in domain.images], dtype=float)
        wrong_colour = (greens(domain) != np.array(domain.targets)).astype(float)
        flipped = (shape != np.array(domain.targets)).astype(float)
        assert abs(np.corrcoef(wrong_colour, flipped)[0, 1]) < 4 / np.sqrt(599)


def test_same_domains_every_time(domains):
    for domain, again in zip(domains, colored_digits.colored_digits(), strict=True):
        np.testing.assert_array_equal(domain.images, again.images)
        assert domain.targets == again.targets


def test_image_is_rgb(domains):
    image = domains[2].image(5)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    np.testing.assert_array_equal(np.asarray(image), domains[2].images[5])
