"""RotatedMNIST and ColoredMNIST: DomainBed's recipe, pixel for pixel, from the same files."""

import logging

import pytest
import torch

from tests.data.readers.idx_files import write_release
from tests.references import domainbed_mnist as reference
from timm_moe_dg.data import evaluation_transform, get_benchmark
from timm_moe_dg.data.readers.mnist import FASHION_MNIST, MNIST
from timm_moe_dg.errors import DataError

NAMES = ["RotatedMNIST", "ColoredMNIST", "RotatedFashionMNIST", "ColoredFashionMNIST"]
AS_STORED = evaluation_transform((28, 28), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def release(tmp_path):
    """A folder, and the images (N, 28, 28) and labels (N,) of its files."""
    return tmp_path, *map(torch.from_numpy, write_release(tmp_path))


def as_a_network_gets_them(domain):
    return torch.stack([AS_STORED(domain.image(index)) for index in range(len(domain))])


@pytest.mark.parametrize("name", ["RotatedMNIST", "RotatedFashionMNIST"])
def test_rotated_images_are_domainbeds(release, name):
    folder, images, labels = release
    domains = get_benchmark(name).read(folder)
    assert [domain.name for domain in domains] == ["0", "15", "30", "45", "60", "75"]
    for domain, (expected, targets) in zip(domains, reference.rotated(images, labels, seed=0), strict=True):
        assert domain.targets == targets.tolist()
        found = as_a_network_gets_them(domain)
        assert torch.allclose(found, expected.expand(-1, 3, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ColoredMNIST", "ColoredFashionMNIST"])
def test_colored_images_labels_and_noise_are_domainbeds(release, name):
    folder, images, labels = release
    domains = get_benchmark(name).read(folder)
    assert [domain.name for domain in domains] == ["+90%", "+80%", "-90%"]
    for domain, (expected, targets) in zip(domains, reference.colored(images, labels, seed=0), strict=True):
        assert domain.targets == targets.tolist()
        found = as_a_network_gets_them(domain)
        assert torch.allclose(found[:, :2], expected, rtol=0, atol=1e-6)
        assert not found[:, 2].any()


def test_shares_of_flipped_labels_and_colors(tmp_path):
    """Four standard errors around the recipe's chances."""
    _, digits = write_release(tmp_path, train=5000, test=1000)
    torch.manual_seed(0)
    order = torch.randperm(6000)
    for position, (domain, noise) in enumerate(
        zip(get_benchmark("ColoredMNIST").read(tmp_path), (0.1, 0.2, 0.9), strict=True)
    ):
        labels = torch.tensor(domain.targets)
        small = torch.from_numpy(digits)[order[position::3]] < 5
        green = torch.tensor([bool(image[..., 1].any()) for image in domain.images])
        assert (small.long() != labels).float().mean().item() == pytest.approx(
            0.25, abs=4 * (0.25 * 0.75 / 2000) ** 0.5
        )
        flipped = (green.long() != labels).float().mean().item()
        assert flipped == pytest.approx(noise, abs=4 * (noise * (1 - noise) / 2000) ** 0.5)


def test_reading_leaves_torchs_generator_alone_and_ignores_its_state(release):
    folder, *_ = release
    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = get_benchmark("ColoredMNIST").read(folder)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    second = get_benchmark("ColoredMNIST").read(folder)
    assert [domain.targets for domain in first] == [domain.targets for domain in second]


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("RotatedMNIST", "MNIST/raw"),
        ("ColoredMNIST", "mnist"),
        ("RotatedFashionMNIST", "FashionMNIST/raw"),
        ("ColoredFashionMNIST", "fashion-mnist"),
    ],
)
def test_the_usual_folders_are_found(tmp_path, name, below):
    write_release(tmp_path / below, zipped=True)
    assert sum(map(len, get_benchmark(name).read(tmp_path))) == 53


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers(name):
    row = get_benchmark(name)
    release = FASHION_MNIST if "Fashion" in name else MNIST
    assert sum(row.images.values()) == sum(release.counts) == 70_000
    assert set(row.images.values()) == ({11_666, 11_667} if "Rotated" in name else {23_333, 23_334})
    assert (row.hparams["lr"], row.hparams["batch_size"], row.steps, row.checkpoint_freq) == (1e-3, 64, 5001, 100)


def test_other_numbers_of_images_are_warned_of(release, caplog):
    folder, *_ = release
    with caplog.at_level(logging.WARNING, "timm_moe_dg"):
        get_benchmark("RotatedFashionMNIST").read(folder)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 7
    assert "where Fashion-MNIST has [7000, 7000" in messages[0]
    assert messages[1].startswith("dataset='RotatedFashionMNIST': 0 holds 9 images where 11667 were published")


def test_colors_whose_names_differ_in_the_sign_alone_are_counted_apart(release, caplog):
    folder, *_ = release
    with caplog.at_level(logging.WARNING, "timm_moe_dg"):
        get_benchmark("ColoredMNIST").read(folder)
    messages = "\n".join(record.getMessage() for record in caplog.records)
    assert "+90% holds 18 images where 23334 were published" in messages
    assert "-90% holds 17 images where 23333 were published" in messages


@pytest.mark.parametrize("name", NAMES)
def test_no_folder(name, tmp_path):
    with pytest.raises(DataError, match="data_dir=None: give --data-dir"):
        get_benchmark(name).read(None)
    with pytest.raises(DataError, match="train-images-idx3-ubyte': no such file"):
        get_benchmark(name).read(tmp_path)
