"""Rotated and colored digits: real handwriting, small enough for a laptop and free of downloads.

Format: the 1,797 digits of 8 x 8 pixels and 17 gray levels that ship with scikit-learn (the test part of the UCI
"Optical Recognition of Handwritten Digits" set, E. Alpaydin and C. Kaynak, 1998), enlarged to 32 x 32 pixels.
License: CC BY 4.0.

Rotated digits. Classes: 0 to 9, about 30 images of each in every domain. Domains: rotations by 0, 15, 30, 45, 60 and 75
degrees, counter-clockwise.

Colored digits, DomainBed's ColoredMNIST recipe: a shortcut that turns around. Red or green ink on black; ColoredMNIST
has two channels, here the third one of an RGB image is zero throughout, so that any timm model takes it. Classes:
whether the digit is below 5, with a quarter of the labels flipped, so that nobody who reads shapes alone can be right
more often than 75% of the time. Domains: how often the ink says the (flipped) label. "+90%" and "+80%" are right that
often, "-90%" is wrong that often; whoever learns the color in the first two fails on the third.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import MissingDependencyError
from ..domains import Domain

ANGLES = (0, 15, 30, 45, 60, 75)
CLASSES = tuple(str(digit) for digit in range(10))
COLORED_CLASSES = ("5 to 9", "0 to 4")
LABEL_NOISE = 0.25
COLOR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}  # how often the color is not that of the label
STORED_SIZE = 32  # pixels; a rotation of 8 pixels would be mostly interpolation, so digits are enlarged before it
SIDE = 8  # pixels, in the file
IN_SCIKIT_LEARN = "datasets/data/digits.csv.gz"
GRAY_LEVELS = 16  # scikit-learn counts ink from 0 to 16
ASSIGNMENT_SEED = 0


class DigitsDomain(Domain[np.ndarray]):
    """The digits of one domain: `images` are uint8, gray (32, 32) or RGB (32, 32, 3)."""

    def image(self, index: int) -> Image.Image:
        """Returns one digit as an RGB image of 32 x 32 pixels."""
        return Image.fromarray(self.images[index]).convert("RGB")


def rotated_digits() -> list[DigitsDomain]:
    """Builds the six rotation domains.

    No digit is in two domains: a fixed permutation of the 1,797 (numpy's `RandomState(0)`) is dealt out in turn, its
    entries i, i + 6, i + 12, ... going to domain i. Sharing digits would put a held-out digit, turned, into training.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    images, targets = load_digits("rotated_digits")
    dealt = np.random.RandomState(ASSIGNMENT_SEED).permutation(len(images))
    domains = []
    for position, angle in enumerate(ANGLES):
        own = dealt[position :: len(ANGLES)]
        turned = [_enlarge_and_rotate(image, angle) for image in images[own]]
        domains.append(DigitsDomain(f"rot_{angle}", CLASSES, targets[own].tolist(), turned))
    return domains


def colored_digits() -> list[DigitsDomain]:
    """Builds the three domains; they are the same every time, while DomainBed draws its own anew for every run.

    Digits are dealt out in turn in the order of a fixed permutation, as in `rotated_digits`, and no digit is in two
    domains. The two kinds of noise are drawn for all digits, in that order, from the same generator.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    images, digits = load_digits("colored_digits")
    random = np.random.RandomState(ASSIGNMENT_SEED)
    dealt = random.permutation(len(images))
    labels = (digits < 5) ^ (random.uniform(size=len(images)) < LABEL_NOISE)
    chance = random.uniform(size=len(images))
    domains = []
    for position, (name, noise) in enumerate(COLOR_NOISE.items()):
        own = dealt[position :: len(COLOR_NOISE)]
        colored = [_ink(images[index], labels[index] ^ (chance[index] < noise)) for index in own]
        domains.append(DigitsDomain(name, COLORED_CLASSES, labels[own].astype(int).tolist(), colored))
    return domains


def load_digits(benchmark: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ink of the 1,797 digits, (N, 8, 8) from 0 to 16, and which digit each is, (N,).

    Args:
        benchmark: Who asks, for the message.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise MissingDependencyError.of(benchmark, "scikit-learn", "train")
    path = Path(package.origin).parent / IN_SCIKIT_LEARN
    if not path.is_file():
        from sklearn import datasets  # which takes seconds to import, and knows where another release has the file

        digits = datasets.load_digits()
        return digits.images, digits.target
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].astype(int)


def enlarge(image: np.ndarray) -> np.ndarray:
    """Ink (8, 8) from 0 to 16 -> gray levels, uint8 (32, 32), bicubic."""
    gray = Image.fromarray((image * (255 / GRAY_LEVELS)).round().astype(np.uint8))
    return np.asarray(gray.resize((STORED_SIZE, STORED_SIZE), Image.Resampling.BICUBIC))


def _enlarge_and_rotate(image: np.ndarray, angle: int) -> np.ndarray:
    return np.asarray(Image.fromarray(enlarge(image)).rotate(angle, Image.Resampling.BILINEAR))


def _ink(image: np.ndarray, green: bool) -> np.ndarray:
    """Ink (8, 8) -> RGB, uint8 (32, 32, 3), with the gray levels in one channel: red is 0, green 1, as ColoredMNIST."""
    colored = np.zeros((*(enlarged := enlarge(image)).shape, 3), dtype=np.uint8)
    colored[..., int(green)] = enlarged
    return colored
