"""The digits: each in one domain, turned the right way, or in a color that is mostly the label's, until it is not."""

import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from timm_moe_dg.data.readers import digits
from timm_moe_dg.errors import MissingDependencyError


@pytest.fixture(scope="module")
def domains():
    return digits.rotated_digits()


def domains_turned_by(monkeypatch, angle):
    monkeypatch.setattr(digits, "ANGLES", (angle,) * 6)
    return digits.rotated_digits()


def test_six_domains_of_all_classes(domains):
    assert [domain.name for domain in domains] == ["rot_0", "rot_15", "rot_30", "rot_45", "rot_60", "rot_75"]
    assert [len(domain) for domain in domains] == [300, 300, 300, 299, 299, 299]
    for domain in domains:
        counts = Counter(domain.targets)
        assert sorted(counts) == list(range(10))
        assert min(counts.values()) >= 18


def test_every_digit_is_in_exactly_one_domain(monkeypatch):
    originals = load_digits()
    expected = Counter()
    for image, target in zip(originals.images, originals.target, strict=True):
        gray = Image.fromarray(np.rint(image * 255 / 16).astype(np.uint8))
        expected[np.asarray(gray.resize((32, 32), Image.Resampling.BICUBIC)).tobytes(), int(target)] += 1
    upright = domains_turned_by(monkeypatch, 0)
    found = Counter(
        (image.tobytes(), target)
        for domain in upright
        for image, target in zip(domain.images, domain.targets, strict=True)
    )
    assert found == expected


def test_rotation_is_counter_clockwise(monkeypatch):
    upright = domains_turned_by(monkeypatch, 0)
    turned = domains_turned_by(monkeypatch, 90)
    np.testing.assert_array_equal(np.rot90(upright[2].images, axes=(1, 2)), turned[2].images)


def test_same_domains_every_time(domains):
    for domain, again in zip(domains, digits.rotated_digits(), strict=True):
        np.testing.assert_array_equal(domain.images, again.images)
        assert domain.targets == again.targets


def test_image_is_rgb(domains):
    image = domains[3].image(7)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    np.testing.assert_array_equal(np.asarray(image)[..., 1], domains[3].images[7])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        MissingDependencyError, match=r"rotated_digits needs scikit-learn.*pip install 'timm_moe_dg\[train"
    ):
        digits.rotated_digits()


# --- colored digits
@pytest.fixture(scope="module")
def colored():
    return digits.colored_digits()


def greens(domain):
    """Whether each digit is green; every digit has ink in exactly one of the first two channels."""
    has_ink = np.stack(domain.images).any(axis=(1, 2))
    np.testing.assert_array_equal(has_ink.sum(axis=1), 1)
    assert not has_ink[:, 2].any()
    return has_ink[:, 1]


def shapes_below_five():
    """Each enlarged digit's pixels -> whether it is below 5."""
    originals = load_digits()
    gray = np.rint(originals.images * 255 / 16).astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC)) for image in gray]
    return {image.tobytes(): target < 5 for image, target in zip(large, originals.target, strict=True)}


def test_three_domains_share_out_every_digit(colored):
    assert [domain.name for domain in colored] == ["+90%", "+80%", "-90%"]
    assert [len(domain) for domain in colored] == [599, 599, 599]
    found = Counter(image.max(axis=2).tobytes() for domain in colored for image in domain.images)
    assert set(found) == set(shapes_below_five())
    assert found.total() == 1797


def test_a_quarter_of_the_labels_is_flipped(colored):
    below_five = shapes_below_five()
    for domain in colored:
        shape = np.array([below_five[image.max(axis=2).tobytes()] for image in domain.images])
        agreement = (shape == np.array(domain.targets)).mean()
        assert abs(agreement - 0.75) < 4 * np.sqrt(0.25 * 0.75 / 599)


@pytest.mark.parametrize(("position", "agreement"), [(0, 0.9), (1, 0.8), (2, 0.1)])
def test_the_color_follows_the_flipped_label_as_the_name_says(colored, position, agreement):
    found = (greens(colored[position]) == np.array(colored[position].targets)).mean()
    assert abs(found - agreement) < 4 * np.sqrt(agreement * (1 - agreement) / 599)


def test_the_two_kinds_of_noise_are_independent(colored):
    """Given the label, the color says nothing about the shape: no correlation within a label beyond chance."""
    below_five = shapes_below_five()
    for domain in colored:
        shape = np.array([below_five[image.max(axis=2).tobytes()] for image in domain.images], dtype=float)
        wrong_color = (greens(domain) != np.array(domain.targets)).astype(float)
        flipped = (shape != np.array(domain.targets)).astype(float)
        assert abs(np.corrcoef(wrong_color, flipped)[0, 1]) < 4 / np.sqrt(599)


def test_colored_digits_are_the_same_every_time(colored):
    for domain, again in zip(colored, digits.colored_digits(), strict=True):
        np.testing.assert_array_equal(domain.images, again.images)
        assert domain.targets == again.targets


def test_a_colored_image_is_rgb(colored):
    image = colored[2].image(5)
    assert (image.mode, image.size) == ("RGB", (32, 32))
    np.testing.assert_array_equal(np.asarray(image), colored[2].images[5])
