"""IDX files: read zipped or not, and refused, by name, when they are not what their names say."""

import gzip

import numpy as np
import pytest

from tests.data.readers.idx_files import write_idx, write_release
from timm_moe_dg.data.readers.mnist import read_idx, read_images_and_labels
from timm_moe_dg.errors import DataError


@pytest.mark.parametrize("zipped", [False, True])
def test_all_images_training_first(tmp_path, zipped):
    expected = write_release(tmp_path, zipped=zipped)
    for found, written in zip(read_images_and_labels(tmp_path, 10), expected, strict=True):
        np.testing.assert_array_equal(found, written)


def test_the_name_with_a_dot(tmp_path):
    images, _ = write_release(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    np.testing.assert_array_equal(read_images_and_labels(tmp_path, 10)[0], images)


def spoil(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda raw: b"\x00\x00\x0d\x03" + raw[4:],
            "has the magic number 0x00000d03 and not",
        ),
        (
            "t10k-labels-idx1-ubyte",
            lambda raw: raw[:-1],
            r"holds 12 values where its header says \(13,\); give the file",
        ),
        ("t10k-images-idx3-ubyte", lambda raw: raw + b"\0", r"holds 10193 values where its header says \(13, 28, 28\)"),
        ("train-images-idx3-ubyte", lambda raw: raw[:6], "holds 0 values where its header says"),
        ("train-images-idx3-ubyte", lambda raw: b"", "has the magic number 0x and not 0x00000803"),
        ("train-images-idx3-ubyte", lambda raw: gzip.compress(raw)[:-40], "cannot be read .*give the file as it was"),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x0a", "row 39 has the label 10; give labels of 0 to 9"),
        (
            "train-labels-idx1-ubyte",
            lambda raw: raw[:7] + b"\x05" + raw[8:13],
            "5 labels of 40 images; give files of one",
        ),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy_in_one_line(tmp_path, name, change, message):
    write_release(tmp_path)
    spoil(tmp_path / name, change)
    with pytest.raises(DataError, match=message) as caught:
        read_images_and_labels(tmp_path, 10)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_of_another_size(tmp_path):
    write_release(tmp_path)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((13, 32, 30)))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte': images of 32x30 pixels; give files of 28x28"):
        read_images_and_labels(tmp_path, 10)


def test_a_missing_file(tmp_path):
    write_release(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte': no such file, nor t10k-labels-idx1-ubyte.gz; give"):
        read_images_and_labels(tmp_path, 10)


def test_the_number_of_axes_is_part_of_the_magic_number(tmp_path):
    path = write_idx(tmp_path / "labels", np.zeros(5))
    assert read_idx(path, 1).shape == (5,)
    with pytest.raises(DataError, match="magic number 0x00000801 and not 0x00000803"):
        read_idx(path, 3)
