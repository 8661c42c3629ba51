"""The digits: all of them, each in one domain, turned the right way."""

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
        grey = Image.fromarray(np.rint(image * 255 / 16).astype(np.uint8))
        expected[np.asarray(grey.resize((32, 32), Image.Resampling.BICUBIC)).tobytes(), int(target)] += 1
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
