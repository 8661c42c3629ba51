"""Rotated digits: real handwriting as six rotation domains, small enough for a laptop and free of downloads.

Format: the 1,797 digits of 8 x 8 pixels and 17 grey levels that ship with scikit-learn (the test part of the UCI
"Optical Recognition of Handwritten Digits" set, E. Alpaydin and C. Kaynak, 1998, CC BY 4.0).
Classes: 0 to 9, about 30 images of each in every domain.
Domains: rotations by 0, 15, 30, 45, 60 and 75 degrees, counter-clockwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from ...errors import MissingDependencyError

ANGLES = (0, 15, 30, 45, 60, 75)
CLASSES = tuple(str(digit) for digit in range(10))
STORED_SIZE = 32  # pixels; a rotation of 8 pixels would be mostly interpolation, so digits are enlarged before it
GREY_LEVELS = 16  # scikit-learn counts ink from 0 to 16
ASSIGNMENT_SEED = 0


@dataclass(frozen=True)
class DigitsDomain:
    """The digits of one domain.

    Attributes:
        name: Such as `rot_` and the angle in degrees.
        targets: The class of each image.
        images: uint8, grey (N, 32, 32) or RGB (N, 32, 32, 3).
        classes: Their names.
    """

    name: str
    targets: Sequence[int]
    images: np.ndarray = field(repr=False)
    classes: tuple[str, ...] = CLASSES

    def __len__(self) -> int:
        return len(self.targets)

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
        turned = np.stack([_enlarge_and_rotate(image, angle) for image in images[own]])
        domains.append(DigitsDomain(f"rot_{angle}", [int(target) for target in targets[own]], turned))
    return domains


def load_digits(benchmark: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ink of the 1,797 digits, (N, 8, 8) from 0 to 16, and which digit each is, (N,).

    Args:
        benchmark: Who asks, for the message.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingDependencyError.of(benchmark, "scikit-learn", "train") from error
    digits = datasets.load_digits()
    return digits.images, digits.target


def enlarge(image: np.ndarray) -> np.ndarray:
    """Ink (8, 8) from 0 to 16 -> grey levels, uint8 (32, 32), bicubic."""
    grey = Image.fromarray((image * (255 / GREY_LEVELS)).round().astype(np.uint8))
    return np.asarray(grey.resize((STORED_SIZE, STORED_SIZE), Image.Resampling.BICUBIC))


def _enlarge_and_rotate(image: np.ndarray, angle: int) -> np.ndarray:
    return np.asarray(Image.fromarray(enlarge(image)).rotate(angle, Image.Resampling.BILINEAR))
