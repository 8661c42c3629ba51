"""RotatedMNIST and ColoredMNIST: DomainBed's recipe, pixel for pixel, from the same files."""

import gzip
import logging

import numpy as np
import pytest
import torch

from tests.data.readers.idx_files import write_idx, write_release
from tests.references import domainbed_mnist as reference
from timm_moe_dg.data import evaluation_transform, get_benchmark
from timm_moe_dg.data.readers.digits import FASHION_MNIST, MNIST, read_idx, read_images_and_labels
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
        actual = as_a_network_gets_them(domain)
        assert torch.allclose(actual, expected.expand(-1, 3, -1, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ColoredMNIST", "ColoredFashionMNIST"])
def test_colored_images_labels_and_noise_are_domainbeds(release, name):
    folder, images, labels = release
    domains = get_benchmark(name).read(folder)
    assert [domain.name for domain in domains] == ["+90%", "+80%", "-90%"]
    for domain, (expected, targets) in zip(domains, reference.colored(images, labels, seed=0), strict=True):
        assert domain.targets == targets.tolist()
        actual = as_a_network_gets_them(domain)
        assert torch.allclose(actual[:, :2], expected, rtol=0, atol=1e-6)
        assert not actual[:, 2].any()


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


@pytest.mark.parametrize(
    ("name", "number", "parts"),
    [
        (
            "RotatedFashionMNIST",
            7,
            ["where Fashion-MNIST has [7000, 7000", "0 holds 9 images where 11667 were"],
        ),
        # Their names differ in the sign alone
        ("ColoredMNIST", 4, ["+90% holds 18 images where 23334 were", "-90% holds 17 images where 23333 were"]),
    ],
)
def test_other_numbers_of_images_are_warned_of(release, caplog, name, number, parts):
    folder, *_ = release
    with caplog.at_level(logging.WARNING, "timm_moe_dg"):
        get_benchmark(name).read(folder)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == number
    assert all(part in "\n".join(messages) for part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_no_folder(name, tmp_path):
    with pytest.raises(DataError, match="data_dir=None: give --data-dir"):
        get_benchmark(name).read(None)
    with pytest.raises(DataError, match="train-images-idx3-ubyte': no such file"):
        get_benchmark(name).read(tmp_path)


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("zipped", [False, True])
def test_all_images_training_first(tmp_path, zipped, mark):
    expected = write_release(tmp_path, zipped=zipped)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", f"{mark}idx"))
    for actual, written in zip(read_images_and_labels(tmp_path, 10), expected, strict=True):
        np.testing.assert_array_equal(actual, written)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HUGE = np.array([2**31, 2**31, 4], dtype=">u4").tobytes()  # a product of 2^64, which is 0 in 64 bits
LARGER = b"\0\0\x08\x03" + np.array([1, 32, 30], dtype=">u4").tobytes() + bytes(960)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (IMAGES, lambda raw: b"\x00\x00\x0d\x03" + raw[4:], "has the magic number 0x00000d03 and not"),
        (LABELS, lambda raw: raw[:-1], r"holds 39 values where its header says \(40,\); give the file"),
        (IMAGES, lambda raw: raw + b"\0", r"holds 31361 values where its header says \(40, 28, 28\)"),
        (IMAGES, lambda raw: raw[:4] + HUGE, r"holds 0 values .* \(2147483648, 2147483648, 4\)"),
        (IMAGES, lambda raw: raw[:6], "holds 0 values where its header says"),
        (IMAGES, lambda raw: b"", "has the magic number 0x and not 0x00000803"),
        (IMAGES, lambda raw: gzip.compress(raw)[:-40], "cannot be read .*give the file as it was"),
        (IMAGES, lambda raw: LARGER, "images of 32x30 pixels; give files of 28x28"),
        (LABELS, lambda raw: raw[:-1] + b"\x0a", "row 39 has the label 10; give labels of 0 to 9"),
        (LABELS, lambda raw: raw[:7] + b"\x05" + raw[8:13], "5 labels of 40 images; give files of one"),
        (LABELS, None, rf"no such file, nor {LABELS}\.gz; give"),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy_in_one_line(tmp_path, name, change, message):
    write_release(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if change is not None:
        (tmp_path / name).write_bytes(change(content))
    with pytest.raises(DataError, match=message) as caught:
        read_images_and_labels(tmp_path, 10)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_number_of_axes_is_part_of_the_magic_number(tmp_path):
    path = write_idx(tmp_path / "labels", np.zeros(5))
    assert read_idx(path, 1).shape == (5,)
    with pytest.raises(DataError, match="magic number 0x00000801 and not 0x00000803"):
        read_idx(path, 3)
