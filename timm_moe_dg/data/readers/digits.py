"""Rotated, colored and geographic digits: scikit-learn's real handwriting, which needs no download, and MNIST's.

Format: the 1,797 digits of 8 x 8 pixels and 17 gray levels that ship with scikit-learn (the test part of the UCI
"Optical Recognition of Handwritten Digits" set, E. Alpaydin and C. Kaynak, 1998), enlarged to 32 x 32 pixels. License:
CC BY 4.0.

Rotated digits: about 30 images of each class in every domain, turned counter-clockwise by 0 to 75 degrees.

Colored digits: DomainBed's ColoredMNIST recipe, a shortcut that is reversed in the last domain. Red or green ink on
black. The third channel is zero, so that any timm model takes the images. Classes: whether the digit is below 5, with a
quarter of the labels flipped, so that shapes alone are right for at most 75%. Domains: how often the color agrees with
the (flipped) label.

Geographic digits: concept shift, where a label's meaning depends on the place, and images do not. Labels: a continent
writes its digits as they are, swaps 6 and 9, exchanges even and odd (0 with 1, 2 with 3, ...), or does both. Rules give
way to each other smoothly (see `rule_probabilities`). A model that ignores the place can follow one rule only. Splits:
train, id_val and id_test on five continents, and ood_test on Oceania, which has the most common rule but coordinates
that are not in training. No digit is in two splits.

RotatedMNIST and ColoredMNIST: as DomainBed makes them (Gulrajani and Lopez-Paz, 2021), from MNIST or Fashion-MNIST, in
IDX files, possibly gzipped (LeCun, Cortes and Burges, 1998; Xiao et al., 2017). A folder holds train-images-idx3-ubyte,
train-labels-idx1-ubyte and the same of t10k, or copies that write a dot for the second hyphen. The 70,000 images,
training images first, are shuffled. Domain i of n gets the entries i, i + n, i + 2n, ... DomainBed draws from torch's
global CPU generator, which its script seeds with the run's seed, so that every run has other domains. Here the same
calls are made with a generator whose seed is always 0, the default of DomainBed's script.

Rotated: 28 x 28 pixels, bilinear, black outside (as in DomainBed now; its first release was bicubic). DomainBed's
single channel is repeated in R, G and B. Colored: DomainBed's two channels are R and G, and B is zero. The first
ColoredMNIST (Arjovsky et al., 2019) took every second pixel, which is commented out in DomainBed.

Licenses: MNIST CC BY-SA 3.0, Fashion-MNIST MIT.
"""

import gzip
import logging
import math
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import DataError, MissingDependencyError
from ..domains import DataDir, FileDomain, given_folder
from .places import Places, PlacesDomain, domains_of

ANGLES = (0, 15, 30, 45, 60, 75)
CLASSES = tuple(str(digit) for digit in range(10))
COLORED_CLASSES = ("5 to 9", "0 to 4")
LABEL_NOISE = 0.25
COLOR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}  # how often the color is not that of the label
STORED_SIZE = 32  # pixels. Digits are enlarged first, because rotating 8 pixels is mostly interpolation.
MNIST_SIDE = 28  # pixels
GRAY_LEVELS = 16  # scikit-learn counts ink from 0 to 16
SEED = 0

# Center (longitude, latitude) and radius of a spherical cap in degrees, then the rule
CONTINENTS = {
    "Africa": (20.0, 2.0, 28.0, "both"),
    "Asia": (92.0, 45.0, 28.0, "swap"),
    "Europe": (15.0, 51.0, 19.0, "plain"),
    "North America": (-100.0, 46.0, 26.0, "plain"),
    "South America": (-60.0, -14.0, 26.0, "parity"),
    "Oceania": (134.0, -26.0, 16.0, "plain"),
}
HELD_OUT = "Oceania"
BORDER = 5.0  # degrees over which one rule's odds against its neighbor fall by a factor of e
SIZES = {"train": 997, "id_val": 200, "id_test": 300, "ood_test": 300}

_PLAIN = np.arange(10)
_SWAP = np.array([0, 1, 2, 3, 4, 5, 9, 7, 8, 6])
_PARITY = _PLAIN ^ 1
RULES = {"plain": _PLAIN, "swap": _SWAP, "parity": _PARITY, "both": _SWAP[_PARITY]}

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


def rotated_digits() -> list[FileDomain[np.ndarray]]:
    """Builds the six rotation domains: domain i gets i, i + 6, i + 12, ... of numpy's `RandomState(0)` permutation."""
    images, targets = load_digits("rotated_digits")
    order = np.random.RandomState(SEED).permutation(len(images))
    domains = []
    for position, angle in enumerate(ANGLES):
        members = order[position :: len(ANGLES)]
        turned = [Image.fromarray(enlarge(image)).rotate(angle, Image.Resampling.BILINEAR) for image in images[members]]
        domains.append(FileDomain(f"rot_{angle}", CLASSES, targets[members].tolist(), list(map(np.asarray, turned))))
    return domains


def colored_digits() -> list[FileDomain[np.ndarray]]:
    """Builds the three color domains, with digits dealt out as in `rotated_digits`, the same in every run.

    The label noise and then the color noise are drawn for all digits from the same generator.
    """
    images, digits = load_digits("colored_digits")
    random = np.random.RandomState(SEED)
    order = random.permutation(len(images))
    # The order of the two calls fixes the data set.
    labels = (digits < 5) ^ (random.uniform(size=len(images)) < LABEL_NOISE)
    chance = random.uniform(size=len(images))
    domains = []
    for position, (name, noise) in enumerate(COLOR_NOISE.items()):
        members = order[position :: len(COLOR_NOISE)]
        enlarged = np.stack([enlarge(image) for image in images[members]])
        colored = in_color(enlarged, labels[members] ^ (chance[members] < noise))
        domains.append(FileDomain(name, COLORED_CLASSES, labels[members].astype(int).tolist(), colored))
    return domains


def geo_digits() -> list[PlacesDomain]:
    """Builds the geographic domains, which are the same in every run."""
    images, digits = load_digits("geo_digits")
    random = np.random.default_rng(SEED)
    remaining = random.permutation(len(images))
    # A split's digits stand once on each of its continents, so that continents differ only in their rules.
    blocks = []  # (split, continent, digits)
    for part, size in SIZES.items():
        members, remaining = remaining[:size], remaining[size:]
        for continent in CONTINENTS:
            if (continent == HELD_OUT) == (part == "ood_test"):
                blocks.append((part, continent, members))
    parts, groups, members_of = zip(*blocks, strict=True)
    sizes = [len(members) for members in members_of]
    lonlat = np.concatenate([_points(random, *pair) for pair in zip(groups, sizes, strict=True)])
    order = np.concatenate(members_of)
    # A uniform number per digit picks its rule: the first one whose cumulated probability exceeds the number.
    thresholds = rule_probabilities(lonlat).cumsum(axis=1)
    rule = (random.random((len(order), 1)) > thresholds[:, :-1]).sum(axis=1)
    labels = np.stack(list(RULES.values()))[rule, digits[order]]
    large = [enlarge(image) for image in images]
    pixels = [large[index] for index in order]
    return domains_of(Places(CLASSES, pixels, labels, lonlat, np.repeat(parts, sizes), np.repeat(groups, sizes)))


def load_digits(benchmark: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ink of the 1,797 digits, (N, 8, 8) from 0 to 16, and which digit each is, (N,)."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise MissingDependencyError.of(benchmark, "scikit-learn", "train")
    # Importing scikit-learn takes a second, which short runs notice, so its file is read directly.
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)


def enlarge(image: np.ndarray) -> np.ndarray:
    """Ink (8, 8) from 0 to 16 -> gray levels, uint8 (32, 32), bicubic."""
    gray = Image.fromarray((image * (255 / GRAY_LEVELS)).round().astype(np.uint8))
    return np.asarray(gray.resize((STORED_SIZE, STORED_SIZE), Image.Resampling.BICUBIC))


def rule_probabilities(lonlat: np.ndarray) -> np.ndarray:
    """Degrees (N, 2) -> probabilities of `RULES`, (N, 4): a softmax over continents of (radius - distance) / BORDER."""
    depth = np.stack([cap[2] - _distance(lonlat, cap[:2]) for cap in CONTINENTS.values()], axis=1) / BORDER
    odds = np.exp(depth - depth.max(axis=1, keepdims=True))
    shares = odds / odds.sum(axis=1, keepdims=True)
    member = np.array([[cap[3] == rule for rule in RULES] for cap in CONTINENTS.values()])
    return shares @ member


def in_color(gray: np.ndarray, is_green: np.ndarray) -> list[np.ndarray]:
    """Gray images (N, H, W) -> RGB, uint8 (H, W, 3), with the gray levels in the red or green channel."""
    colored = np.zeros((*gray.shape, 3), dtype=np.uint8)
    colored[np.arange(len(gray)), :, :, is_green.astype(int)] = gray
    return list(colored)


def _points(random: np.random.Generator, continent: str, number: int) -> np.ndarray:
    """Draws points uniformly from a continent's cap, as (number, 2) float32 degrees."""
    longitude, latitude, radius, _ = CONTINENTS[continent]
    height = random.uniform(np.cos(np.radians(radius)), 1.0, number)  # equal heights cut a cap into equal areas
    azimuth = random.uniform(0.0, 2 * np.pi, number)
    width = np.sqrt(1 - height**2)
    north, east = width * np.cos(azimuth), width * np.sin(azimuth)
    # Turn the cap from the pole, where it was drawn, to its center.
    sine, cosine = np.sin(np.radians(latitude)), np.cos(np.radians(latitude))
    out = height * cosine - north * sine
    up = height * sine + north * cosine
    degrees = [longitude + np.degrees(np.arctan2(east, out)), np.degrees(np.arcsin(up))]
    wrapped = (degrees[0] + 180.0) % 360.0 - 180.0
    return np.stack([wrapped, degrees[1]], axis=1).astype(np.float32)


def _distance(lonlat: np.ndarray, center: tuple[float, float]) -> np.ndarray:
    """Great-circle distance of points (N, 2) to a center, in degrees."""
    lon, lat = np.radians(lonlat.astype(np.float64)).T
    lon0, lat0 = np.radians(center)
    cosine = np.sin(lat) * np.sin(lat0) + np.cos(lat) * np.cos(lat0) * np.cos(lon - lon0)
    return np.degrees(np.arccos(cosine.clip(-1.0, 1.0)))


def read_rotated(data_dir: DataDir, release: IdxRelease) -> list[FileDomain[np.ndarray]]:
    """Reads the six rotation domains from the folder of the four files, or from its parent."""
    images, labels = _shuffled(data_dir, release, torch.Generator().manual_seed(SEED))
    domains = []
    for position, angle in enumerate(ANGLES):
        members = slice(position, None, len(ANGLES))
        upright = list(images[members].numpy())
        domains.append(FileDomain(str(angle), release.classes, labels[members].tolist(), upright, angle=angle))
    return domains


def read_colored(data_dir: DataDir, release: IdxRelease) -> list[FileDomain[np.ndarray]]:
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
        domains.append(FileDomain(name, COLORED_CLASSES, labels.long().tolist(), colored))
    return domains


def read_images_and_labels(folder: Path, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads uint8 images (N, 28, 28) and labels (N,) of a release: training images first, then test images."""
    pairs = []
    for part in ("train", "t10k"):
        images, labels = (read_idx(folder, f"{part}-{kind}", axes) for kind, axes in (("images", 3), ("labels", 1)))
        if images.shape != (len(labels), MNIST_SIDE, MNIST_SIDE) or labels.max(initial=0) >= num_classes:
            content = f"images of {images.shape} and {len(labels)} labels up to {labels.max(initial=0)}"
            raise DataError(f"{str(folder)!r}: {part} has {content}; give the files of one release, as published")
        pairs.append((images, labels))
    images, labels = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return images, labels


def read_idx(folder: Path, stem: str, axes: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes, gzipped or not, as a uint8 array with so many axes.

    The file is two zero bytes, 8 for unsigned bytes, the number of axes, each axis's length as a big-endian 32-bit
    integer, then the values.
    """
    paths = sorted(folder.glob(f"{stem}[-.]idx{axes}-ubyte*"))
    if not paths:
        raise DataError(f"{str(folder)!r}: holds no file {stem}-idx{axes}-ubyte; give --data-dir, its folder")
    try:
        content = paths[0].read_bytes()
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"its first bytes are {content[:4]!r}")
        start = 4 + 4 * axes
        shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
        if len(content) != start + math.prod(shape):
            raise ValueError(f"holds {len(content) - start} values for {shape}")
        return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{str(paths[0])!r}: cannot be read ({error}); give the file as it was published") from error


def _shuffled(data_dir: DataDir, release: IdxRelease, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) and labels (N,), uint8."""
    root = given_folder(data_dir, f"{release.name}'s four IDX files")
    folders = [root, *map(root.joinpath, release.folders)]
    folder = next((path for path in folders if any(path.glob("train-images[-.]idx3-ubyte*"))), root)
    images, labels = read_images_and_labels(folder, len(release.classes))
    counts = np.bincount(labels, minlength=len(release.classes)).tolist()
    if counts != list(release.counts):
        message = "%r: holds %s images of the ten classes where %s has %s; results do not compare"
        _LOGGER.warning(message, str(folder), counts, release.name, list(release.counts))
    order = torch.randperm(len(images), generator=generator)
    return torch.from_numpy(images)[order], torch.from_numpy(labels)[order]


def _flipped(bits: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    return bits ^ (torch.rand(len(bits), generator=generator) < chance)
