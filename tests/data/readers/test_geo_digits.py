"""Digits on the globe: that the label depends on the place, smoothly, and that no digit leaks."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from timm_moe_dg.data.readers.digits import CONTINENTS, HELD_OUT, RULES, geo_digits, rule_probabilities
from timm_moe_dg.data.readers.places import PlacesDomain


@pytest.fixture(scope="module")
def domains() -> dict[str, PlacesDomain]:
    return {domain.name: domain for domain in geo_digits()}


def test_domains_and_sizes(domains: dict[str, PlacesDomain]) -> None:
    trained = sorted(set(CONTINENTS) - {HELD_OUT})
    assert list(domains) == [f"{role} {name}" for role in ("train", "id") for name in trained] + ["ood Oceania"]
    for domain in domains.values():
        sizes = (len(domain.split.inside), len(domain.split.outside))
        assert sizes == ((997, 200) if domain.role == "train" else (300, 0))
        assert domain.classes == tuple("0123456789")
        assert domain.image(0).size == (32, 32)
        assert len(domain) == len(domain.metadata) == len(domain.images) == sum(sizes)


def fingerprints(domain: PlacesDomain, rows: np.ndarray) -> list[bytes]:
    return [domain.images[row].tobytes() for row in rows]


def test_no_digit_is_in_two_splits_and_continents_share_theirs(domains: dict[str, PlacesDomain]) -> None:
    train, held, tested, ood = (
        fingerprints(domains["train Asia"], domains["train Asia"].split.inside),
        fingerprints(domains["train Asia"], domains["train Asia"].split.outside),
        fingerprints(domains["id Asia"], domains["id Asia"].split.inside),
        fingerprints(domains["ood Oceania"], domains["ood Oceania"].split.inside),
    )
    assert len({*train, *held, *tested, *ood}) == len(train) + len(held) + len(tested) + len(ood) == 1797
    for continent in set(CONTINENTS) - {HELD_OUT}:
        assert fingerprints(domains[f"id {continent}"], np.arange(300)) == tested


def test_labels_follow_the_rule_of_the_place(domains: dict[str, PlacesDomain]) -> None:
    digits = load_digits()
    truth = {}
    for image, digit in zip(digits.images, digits.target, strict=True):
        truth[(image * 16).astype(np.uint8).tobytes()] = digit
    america = np.array(domains["id North America"].targets)  # the plain rule, far from its neighbors
    counts = np.bincount(america, minlength=10)
    assert counts.min() > 15  # every digit occurs
    for continent, (_, _, _, rule) in CONTINENTS.items():
        if continent != HELD_OUT:
            followed = np.array(domains[f"id {continent}"].targets) == RULES[rule][america]
            assert 0.93 < followed.mean() <= 1.0
    assert RULES["both"].tolist() == [1, 0, 3, 2, 5, 4, 7, 9, 6, 8]  # even and odd exchanged, then 6 and 9 swapped


def test_points_lie_on_their_continent_and_are_spread_evenly(domains: dict[str, PlacesDomain]) -> None:
    for name, domain in domains.items():
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


def test_it_is_the_same_every_time(domains: dict[str, PlacesDomain]) -> None:
    for again in geo_digits():
        assert list(again.targets) == list(domains[again.name].targets)
        assert np.array_equal(again.metadata, domains[again.name].metadata)
