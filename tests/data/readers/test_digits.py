"""The digits: each in one domain, turned the right way, or in a color that is mostly the label's, until it is not."""

import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from timm_moe_dg.data.readers import digits
from timm_moe_dg.data.readers.digits import CONTINENTS, HELD_OUT, RULES, geo_digits, rule_probabilities
from timm_moe_dg.data.readers.places import PlacesDomain
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


def enlarged_digits():
    """Each digit's pixels, enlarged, and which digit it is."""
    originals = load_digits()
    gray = np.rint(originals.images * 255 / 16).astype(np.uint8)
    large = [np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BICUBIC)) for image in gray]
    return [(image.tobytes(), int(target)) for image, target in zip(large, originals.target, strict=True)]


def test_every_digit_is_in_exactly_one_domain(monkeypatch):
    pairs = []
    for domain in domains_turned_by(monkeypatch, 0):
        pairs += [(image.tobytes(), target) for image, target in zip(domain.images, domain.targets, strict=True)]
    assert Counter(pairs) == Counter(enlarged_digits())


def test_rotation_is_counter_clockwise(monkeypatch):
    upright = domains_turned_by(monkeypatch, 0)
    turned = domains_turned_by(monkeypatch, 90)
    np.testing.assert_array_equal(np.rot90(upright[2].images, axes=(1, 2)), turned[2].images)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        MissingDependencyError, match=r"rotated_digits needs scikit-learn.*pip install 'timm_moe_dg\[train"
    ):
        digits.rotated_digits()


@pytest.mark.parametrize("make", [digits.rotated_digits, digits.colored_digits, digits.geo_digits])
def test_domains_are_the_same_every_time_and_images_are_rgb(make):
    for domain, again in zip(make(), make(), strict=True):
        np.testing.assert_array_equal(domain.images, again.images)
        np.testing.assert_array_equal(domain.targets, again.targets)
        np.testing.assert_array_equal(domain.metadata, again.metadata)
        image = np.asarray(domain.image(7))
        assert image.shape == (32, 32, 3)
        np.testing.assert_array_equal(image, np.broadcast_to(domain.images[7].reshape(32, 32, -1), image.shape))


def test_three_domains_share_out_every_digit_with_noise_of_labels_and_colors():
    """A quarter of the labels is flipped, colors agree with labels as names say, and both are independent."""
    below_five = {pixels: digit < 5 for pixels, digit in enlarged_digits()}
    colored = digits.colored_digits()
    assert [domain.name for domain in colored] == ["+90%", "+80%", "-90%"]
    assert [len(domain) for domain in colored] == [599, 599, 599]
    shapes = [[image.max(axis=2).tobytes() for image in domain.images] for domain in colored]
    assert {shape for rows in shapes for shape in rows} == set(below_five)
    for domain, rows, agreement in zip(colored, shapes, (0.9, 0.8, 0.1), strict=True):
        labels = np.array(domain.targets)
        has_ink = np.stack(domain.images).any(axis=(1, 2))
        np.testing.assert_array_equal(has_ink.sum(axis=1), 1)
        assert not has_ink[:, 2].any()
        right_color, right_label = has_ink[:, 1] == labels, [below_five[shape] for shape in rows] == labels
        assert abs(right_label.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / 599)
        assert abs(right_color.mean() - agreement) < 4 * np.sqrt(agreement * (1 - agreement) / 599)
        assert abs(np.corrcoef(right_color, right_label)[0, 1]) < 4 / np.sqrt(599)


@pytest.fixture(scope="module")
def geo() -> dict[str, PlacesDomain]:
    return {domain.name: domain for domain in geo_digits()}


def test_domains_and_sizes(geo: dict[str, PlacesDomain]) -> None:
    trained = sorted(set(CONTINENTS) - {HELD_OUT})
    assert list(geo) == [f"{role} {name}" for role in ("train", "id") for name in trained] + ["ood Oceania"]
    for domain in geo.values():
        sizes = (len(domain.split.inside), len(domain.split.outside))
        assert sizes == ((997, 200) if domain.role == "train" else (300, 0))
        assert domain.classes == tuple("0123456789")
        assert domain.image(0).size == (32, 32)
        assert len(domain) == len(domain.metadata) == len(domain.images) == sum(sizes)


def test_no_digit_is_in_two_splits_and_continents_share_theirs(geo: dict[str, PlacesDomain]) -> None:
    images = {name: [image.tobytes() for image in domain.images] for name, domain in geo.items()}
    splits = [images[name] for name in ("train Asia", "id Asia", "ood Oceania")]
    assert len({image for split in splits for image in split}) == sum(map(len, splits)) == 1797
    for continent in set(CONTINENTS) - {HELD_OUT}:
        assert images[f"id {continent}"] == images["id Asia"]


def test_labels_follow_the_rule_of_the_place(geo: dict[str, PlacesDomain]) -> None:
    america = np.array(geo["id North America"].targets)  # the plain rule, far from its neighbors
    counts = np.bincount(america, minlength=10)
    assert counts.min() > 15  # every digit occurs
    for continent, (_, _, _, rule) in CONTINENTS.items():
        if continent != HELD_OUT:
            followed = np.array(geo[f"id {continent}"].targets) == RULES[rule][america]
            assert 0.93 < followed.mean() <= 1.0
    assert RULES["both"].tolist() == [1, 0, 3, 2, 5, 4, 7, 9, 6, 8]  # even and odd exchanged, then 6 and 9 swapped


def test_points_lie_on_their_continent_and_are_spread_evenly(geo: dict[str, PlacesDomain]) -> None:
    for name, domain in geo.items():
        longitude, latitude, radius, _ = CONTINENTS[name.split(" ", 1)[1]]
        lon, lat = np.radians(domain.metadata.astype(float)).T
        x = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)])
        lon0, lat0 = np.radians([longitude, latitude])
        height = np.array([np.cos(lat0) * np.cos(lon0), np.cos(lat0) * np.sin(lon0), np.sin(lat0)]) @ x
        assert np.degrees(np.arccos(height.clip(-1, 1))).max() < radius + 1e-3
        # uniform on a cap: the height is uniform between cos(radius) and 1
        assert height.mean() == pytest.approx((1 + np.cos(np.radians(radius))) / 2, abs=0.006)
        assert (np.abs(domain.metadata) <= [180, 90]).all()


def test_rules_give_way_to_each_other_smoothly() -> None:
    # from the middle of Europe (plain) south to that of Africa (both), in steps of a tenth of a degree
    path = np.stack([np.full(451, 17.0), np.linspace(50, 5, 451)], axis=1)
    shares = rule_probabilities(path)
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    plain, both = shares[:, 0], shares[:, 3]
    assert plain[0] > 0.95
    assert both[-1] > 0.95
    assert np.abs(np.diff(plain)).max() < 0.02
    assert (np.diff(plain[100:400]) < 0).all()
    assert 0.4 < plain[(plain - both) > 0][-1] < 0.6
