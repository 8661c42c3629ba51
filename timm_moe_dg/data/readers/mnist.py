"""RotatedMNIST and ColoredMNIST as DomainBed makes them (Gulrajani and Lopez-Paz, 2021), from MNIST or Fashion-MNIST.

Format: IDX files, possibly gzipped (LeCun, Cortes and Burges, 1998; Xiao et al., 2017): two zero bytes, 8 for unsigned
bytes, the number of axes, each axis's length as a big-endian 32-bit integer, then the values. A folder holds
train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k, or copies that write a dot for the second hyphen.

The 70,000 images, training images first, are shuffled. Domain i of n gets the entries i, i + n, i + 2n, ... DomainBed
draws from torch's global CPU generator, which its script seeds with the run's seed, so that every run has other
domains. Here the same calls are made with a generator whose seed is always 0, the default of DomainBed's script. All
runs, splits and seeds share the domains that DomainBed has there.

Rotated: 28 x 28 pixels, counter-clockwise by 0 to 75 degrees, bilinear, black outside (as in DomainBed now; its first
release was bicubic). DomainBed's single channel is repeated in R, G and B.

Colored: whether the class is below 5, flipped for a quarter of the images, and a color that is the (flipped) label,
flipped itself as often as the domain says. DomainBed's two channels are R and G, and B is zero: color 0 is red. The
first ColoredMNIST (Arjovsky et al., 2019) took every second pixel, which is commented out in DomainBed.

Licenses: MNIST CC BY-SA 3.0, Fashion-MNIST MIT.
"""

import gzip
import logging
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from ...errors import DataError
from ..domains import DataDir
from .digits import ANGLES, CLASSES, COLOR_NOISE, COLORED_CLASSES, LABEL_NOISE, DigitsDomain, in_color

SEED = 0
SIDE = 28  # pixels
_LOGGER = logging.getLogger(__name__)


class IdxRelease(NamedTuple):
    """One of the data sets in MNIST's layout."""

    name: str  # for messages
    folders: tuple[str, ...]  # names of the folder below the data folder, torchvision's first
    classes: tuple[str, ...]
    counts: tuple[int, ...]  # images of each class, both parts together, as published


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


class TurnedDomain(DigitsDomain):
    """The images of one rotation domain, stored upright, gray (28, 28), and turned when they are read."""

    def image(self, index: int) -> Image.Image:
        """Returns one image as RGB."""
        upright = Image.fromarray(self.images[index])
        return rotate(upright, self.angle, InterpolationMode.BILINEAR, fill=[0]).convert("RGB")


def read_rotated(data_dir: DataDir, release: IdxRelease) -> list[TurnedDomain]:
    """Reads the six rotation domains from the folder of the four files, or from its parent."""
    images, labels = _shuffled(data_dir, release, torch.Generator().manual_seed(SEED))
    domains = []
    for position, angle in enumerate(ANGLES):
        members = slice(position, None, len(ANGLES))
        upright = list(images[members].numpy())
        domains.append(TurnedDomain(str(angle), release.classes, labels[members].tolist(), upright, angle=angle))
    return domains


def read_colored(data_dir: DataDir, release: IdxRelease) -> list[DigitsDomain]:
    """Reads the three color domains from the folder of the four files, or from its parent."""
    generator = torch.Generator().manual_seed(SEED)
    images, classes = _shuffled(data_dir, release, generator)
    domains = []
    for position, (name, noise) in enumerate(COLOR_NOISE.items()):
        # DomainBed draws a domain's label noise and then its color noise.
        members = slice(position, None, len(COLOR_NOISE))
        labels = _flipped(classes[members] < 5, LABEL_NOISE, generator)
        colors = _flipped(labels, noise, generator)
        colored = in_color(images[members].numpy(), colors.numpy())
        domains.append(DigitsDomain(name, COLORED_CLASSES, labels.long().tolist(), colored))
    return domains


def read_images_and_labels(folder: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads uint8 images (N, 28, 28) and labels (N,) of a release: training images first, then test images."""
    pairs = [_read_part(folder, part, num_classes) for part in ("train", "t10k")]
    images, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return images, labels


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads one IDX file of unsigned bytes, gzipped or not, as a uint8 array with so many axes."""
    remedy = "give the file as it was published"
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{str(path)!r}: cannot be read ({error}); {remedy}") from error
    magic, expected = content[:4], bytes([0, 0, 8, axes])
    if magic != expected:
        raise DataError(f"{str(path)!r}: has the magic number 0x{magic.hex()} and not 0x{expected.hex()}; {remedy}")
    header = 4 + 4 * axes
    shape = tuple(map(int, np.frombuffer(content[4:header].ljust(4 * axes, b"\0"), dtype=">u4")))
    values = len(content) - header
    if values != math.prod(shape):
        raise DataError(f"{str(path)!r}: holds {max(values, 0)} values where its header says {shape}; {remedy}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _read_part(folder: Path, part: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    image_file, label_file = _find_idx(folder, f"{part}-images", 3), _find_idx(folder, f"{part}-labels", 1)
    images, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if images.shape[1:] != (SIDE, SIDE):
        size = "{}x{}".format(*images.shape[1:])
        raise DataError(f"{str(image_file)!r}: images of {size} pixels; give files of {SIDE}x{SIDE}, as published")
    if len(labels) != len(images):
        raise DataError(f"{str(label_file)!r}: {len(labels)} labels of {len(images)} images; give files of one release")
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        row, label = wrong[0], labels[wrong[0]]
        raise DataError(f"{str(label_file)!r}: row {row} has the label {label}; give labels of 0 to {num_classes - 1}")
    return images, labels


def _find_idx(folder: Path, stem: str, axes: int) -> Path:
    names = [f"{stem}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{str(folder / names[0])!r}: no such file, nor {names[1]}; give --data-dir, the folder of both")


def _shuffled(data_dir: DataDir, release: IdxRelease, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) and labels (N,), uint8."""
    if data_dir is None:
        raise DataError(f"data_dir=None: give --data-dir, the folder of {release.name}'s four IDX files")
    folders = [Path(data_dir, name) for name in ("", *release.folders)]
    folder = next((path for path in folders if any(path.glob("train-images[-.]idx3-ubyte*"))), folders[0])
    images, labels = read_images_and_labels(folder, len(release.classes))
    counts = np.bincount(labels, minlength=len(release.classes)).tolist()
    if counts != list(release.counts):
        message = "%r: holds %s images of the ten classes where %s has %s; results do not compare"
        _LOGGER.warning(message, str(folder), counts, release.name, list(release.counts))
    order = torch.randperm(len(images), generator=generator)
    return torch.from_numpy(images)[order], torch.from_numpy(labels)[order]


def _flipped(bits: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    return bits ^ (torch.rand(len(bits), generator=generator) < chance)
