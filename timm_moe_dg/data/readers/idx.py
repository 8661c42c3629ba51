"""IDX files, the format of MNIST (LeCun, Cortes and Burges, 1998) and Fashion-MNIST (Xiao et al., 2017).

Format: two zero bytes, 8 for unsigned bytes, the number of axes, each axis's length as a big-endian 32-bit integer,
then the values; possibly gzipped. A folder holds four files: train-images-idx3-ubyte, train-labels-idx1-ubyte and the
same of t10k, each with or without .gz; copies that write a dot for the second hyphen are read too.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataError
from .digits import CLASSES

SIDE = 28  # pixels
PARTS = ("train", "t10k")
_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTES = 8


@dataclass(frozen=True)
class IdxRelease:
    """One of the data sets in MNIST's layout.

    Attributes:
        name: For messages.
        folders: Names of the folder below the data folder; torchvision's comes first.
        classes: Class names.
        counts: Images of each class, both parts together, as published.
    """

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    counts: tuple[int, ...]


MNIST = IdxRelease(
    name="MNIST",
    folders=("MNIST/raw", "MNIST", "mnist"),
    classes=CLASSES,
    counts=(6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958),
)
FASHION_MNIST = IdxRelease(
    name="Fashion-MNIST",
    folders=("FashionMNIST/raw", "FashionMNIST", "fashion-mnist"),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    counts=(7000,) * 10,
)


def read_images_and_labels(folder: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads the four files: training images first, then those for testing.

    Args:
        folder: Holds the files.
        num_classes: Labels must be below it.

    Returns:
        Images, uint8 (N, 28, 28), and labels, uint8 (N,).

    Raises:
        DataError: A file is missing, cannot be read, or does not hold what its name says.
    """
    pairs = [_read_part(folder, part, num_classes) for part in PARTS]
    images, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return images, labels


def find_idx(folder: Path, stem: str, axes: int) -> Path:
    """Finds a file under one of its usual names.

    Args:
        folder: Where it lies.
        stem: Such as train-images.
        axes: Their number, which is part of the name.

    Raises:
        DataError: There is no such file.
    """
    names = [f"{stem}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise DataError(
            f"{str(folder / names[0])!r}: no such file, nor {names[1]}; give --data-dir, the folder of both"
        )
    return found[0]


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads one file of unsigned bytes.

    Args:
        path: The file, gzipped or not.
        axes: How many there must be.

    Returns:
        uint8, of the shape that the header gives.

    Raises:
        DataError: The file cannot be read, has another magic number, or is shorter or longer than its header says.
    """
    remedy = "give the file as it was published"
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{str(path)!r}: cannot be read ({error}); {remedy}") from error
    magic, expected = content[:4], bytes([0, 0, _UNSIGNED_BYTES, axes])
    if magic != expected:
        raise DataError(f"{str(path)!r}: has the magic number 0x{magic.hex()} and not 0x{expected.hex()}; {remedy}")
    header = 4 + 4 * axes
    shape = tuple(map(int, np.frombuffer(content[4:header].ljust(4 * axes, b"\0"), dtype=">u4")))
    values = len(content) - header
    if values != np.prod(shape):
        raise DataError(f"{str(path)!r}: holds {max(values, 0)} values where its header says {shape}; {remedy}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _read_part(folder: Path, part: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    of_images, of_labels = find_idx(folder, f"{part}-images", 3), find_idx(folder, f"{part}-labels", 1)
    images, labels = read_idx(of_images, 3), read_idx(of_labels, 1)
    if images.shape[1:] != (SIDE, SIDE):
        size = "{}x{}".format(*images.shape[1:])
        raise DataError(f"{str(of_images)!r}: images of {size} pixels; give files of {SIDE}x{SIDE}, as published")
    if len(labels) != len(images):
        raise DataError(f"{str(of_labels)!r}: {len(labels)} labels of {len(images)} images; give files of one release")
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        row, label = wrong[0], labels[wrong[0]]
        raise DataError(f"{str(of_labels)!r}: row {row} has the label {label}; give labels of 0 to {num_classes - 1}")
    return images, labels
