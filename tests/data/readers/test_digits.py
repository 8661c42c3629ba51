"""Digits: each in one domain, turned the right way, or in a color that is mostly the label's; DomainBed's MNIST."""

import gzip
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from tests.data.files import signature, write_release
from tests.references import domainbed_mnist as reference
from timm_moe_dg.data import evaluation_transform, get_benchmark
from timm_moe_dg.data.readers import digits
from timm_moe_dg.data.readers.digits import CONTINENTS, HELD_OUT, RULES, geo_digits, read_images_and_labels
from timm_moe_dg.data.readers.places import PlacesDomain
from timm_moe_dg.errors import DataError


def domains_turned_by(monkeypatch, angle):
    monkeypatch.setattr(digits, "ANGLES", (angle,) * 6)
    return digits.rotated_digits()


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


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (digits.rotated_digits, "83404fc7c4ad"),
        (digits.colored_digits, "4f258f6f652f"),
        (digits.geo_digits, "45b9cad1d701"),
    ],
)
def test_domains_are_the_same_in_every_release_and_images_are_rgb(make, expected):
    assert signature(make.__name__) == expected
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


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder, and the images (N, 28, 28) and labels (N,) of MNIST's files in it."""
    folder = tmp_path_factory.mktemp("mnist")
    return folder, *map(torch.from_numpy, write_release(folder))


def as_a_network_gets_them(domain):
    view = evaluation_transform((28, 28), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return torch.stack([view(domain.image(index)) for index in range(len(domain))])


@pytest.mark.parametrize("name", ["RotatedMNIST", "RotatedFashionMNIST"])
def test_rotated_images_are_domainbeds(release, name):
    folder, images, labels = release
    domains = get_benchmark(name).read(folder)
    assert [domain.name for domain in domains] == ["0", "15", "30", "45", "60", "75"]
    for domain, (expected, targets) in zip(domains, reference.rotated(images, labels, seed=0), strict=True):
        assert domain.targets == targets.tolist()
        actual = as_a_network_gets_them(domain)
        assert torch.allclose(actual, expected.expand(-1, 3, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ColoredMNIST", "ColoredFashionMNIST"])
def test_colored_images_labels_and_noise_are_domainbeds_whatever_torchs_generator_is_at(release, name):
    folder, images, labels = release
    torch.manual_seed(11)
    before = torch.get_rng_state()
    domains = get_benchmark(name).read(folder)
    assert torch.equal(torch.get_rng_state(), before)
    assert [domain.name for domain in domains] == ["+90%", "+80%", "-90%"]
    for domain, (expected, targets) in zip(domains, reference.colored(images, labels, seed=0), strict=True):
        assert domain.targets == targets.tolist()
        actual = as_a_network_gets_them(domain)
        assert torch.allclose(actual[:, :2], expected, rtol=0, atol=1e-6)
        assert not actual[:, 2].any()


@pytest.mark.parametrize(
    ("name", "below"),
    [("RotatedMNIST", "MNIST/raw"), ("ColoredMNIST", "mnist"), ("RotatedFashionMNIST", "FashionMNIST/raw")],
)
def test_the_usual_folders_are_found(tmp_path, name, below):
    write_release(tmp_path / below, zipped=True)
    assert sum(map(len, get_benchmark(name).read(tmp_path))) == 53
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        get_benchmark(name).read(tmp_path.parent)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HUGE = np.array([2**31, 2**31, 4], dtype=">u4").tobytes()  # a product of 2^64, which is 0 in 64 bits
LARGER = b"\0\0\x08\x03" + np.array([40, 32, 30], dtype=">u4").tobytes() + bytes(40 * 960)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (IMAGES, lambda raw: b"\x00\x00\x0d\x03" + raw[4:]),  # other numbers than bytes
        (LABELS, lambda raw: raw[:-1]),
        (IMAGES, lambda raw: raw[:4] + HUGE),
        (IMAGES, lambda raw: gzip.compress(raw)[:-40]),
        (IMAGES, lambda raw: LARGER),
        (LABELS, lambda raw: raw[:-1] + b"\x0a"),  # an eleventh class
        (LABELS, lambda raw: raw[:7] + b"\x05" + raw[8:13]),  # 5 labels of 40 images
        (LABELS, None),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, name, change):
    write_release(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if change is not None:
        (tmp_path / name).write_bytes(change(content))
    with pytest.raises(DataError, match=rf"^'{tmp_path}.*published|holds no file {LABELS}") as caught:
        read_images_and_labels(tmp_path, 10)
    assert "\n" not in str(caught.value)
