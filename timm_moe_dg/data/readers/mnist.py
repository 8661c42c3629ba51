"""RotatedMNIST and ColoredMNIST as DomainBed makes them (Gulrajani and Lopez-Paz, 2021), from MNIST or Fashion-MNIST.

The 70,000 images, training images before those for testing, are shuffled; domain i of n gets the entries i, i + n,
i + 2n, ... of the order. DomainBed draws from torch's global CPU generator, which its script seeds with the run's seed,
so that every run has domains of its own. Here the same calls are made in the same order with a generator whose seed is
always 0, the default of DomainBed's script: all runs, splits and seeds share the domains that DomainBed has there.

Rotated: 28 x 28 pixels, counter-clockwise by 0 to 75 degrees, bilinear, black where nothing was (as DomainBed does now;
its first release was bicubic). DomainBed's single channel stands in all of R, G and B.

Colored: whether the class is below 5, flipped for a quarter of the images, and a color that is the (flipped) label,
flipped itself as often as the domain says. DomainBed's two channels are R and G, and B is zero, as in `colored_digits`:
color 0 is red. The images keep 28 x 28 pixels; taking every second pixel, as the first ColoredMNIST did (Arjovsky et
al., 2019), is commented out in DomainBed.

Licenses: MNIST CC BY-SA 3.0, Fashion-MNIST MIT.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from ...errors import DataError
from ..domains import DataDir
from .digits import ANGLES, COLOR_NOISE, COLORED_CLASSES, LABEL_NOISE, DigitsDomain
from .idx import IdxRelease, find_idx, read_images_and_labels

SEED = 0

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TurnedDomain(DigitsDomain):
    """The images of one rotation domain, stored upright, gray (28, 28), and turned when they are read.

    Attributes:
        angle: Degrees, counter-clockwise.
    """

    angle: int = field(kw_only=True)

    def image(self, index: int) -> Image.Image:
        """Returns one image as RGB."""
        upright = Image.fromarray(self.images[index])
        return rotate(upright, self.angle, InterpolationMode.BILINEAR, fill=[0]).convert("RGB")


def read_rotated(data_dir: DataDir, release: IdxRelease) -> list[TurnedDomain]:
    """Reads the six rotation domains.

    Args:
        data_dir: The folder of the four files, or one that holds it under one of the release's names.
        release: Which data set.

    Raises:
        DataError: A file is missing or damaged; see `idx`.
    """
    images, labels = _shuffled(data_dir, release, torch.Generator().manual_seed(SEED))
    domains = []
    for position, angle in enumerate(ANGLES):
        own = slice(position, None, len(ANGLES))
        upright = list(images[own].numpy())
        domains.append(TurnedDomain(str(angle), release.classes, labels[own].tolist(), upright, angle=angle))
    return domains


def read_colored(data_dir: DataDir, release: IdxRelease) -> list[DigitsDomain]:
    """Reads the three domains of colors.

    Args:
        data_dir: See `read_rotated`.
        release: Which data set.

    Raises:
        DataError: A file is missing or damaged; see `idx`.
    """
    generator = torch.Generator().manual_seed(SEED)
    images, classes = _shuffled(data_dir, release, generator)
    domains = []
    for position, (name, noise) in enumerate(COLOR_NOISE.items()):
        own = slice(position, None, len(COLOR_NOISE))
        labels = _flipped(classes[own] < 5, LABEL_NOISE, generator)
        colors = _flipped(labels, noise, generator)
        inked = _inked(images[own].numpy(), colors.numpy())
        domains.append(DigitsDomain(name, COLORED_CLASSES, labels.long().tolist(), inked))
    return domains


def _shuffled(data_dir: DataDir, release: IdxRelease, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (N, 28, 28) and labels (N,), uint8."""
    folder = _folder(data_dir, release)
    images, labels = read_images_and_labels(folder, len(release.classes))
    found = np.bincount(labels, minlength=len(release.classes)).tolist()
    if found != list(release.counts):
        message = "%r: holds %s images of the ten classes where %s has %s; results do not compare"
        _LOGGER.warning(message, str(folder), found, release.name, list(release.counts))
    order = torch.randperm(len(images), generator=generator)
    return torch.from_numpy(images)[order], torch.from_numpy(labels)[order]


def _folder(data_dir: DataDir, release: IdxRelease) -> Path:
    if data_dir is None:
        raise DataError(f"data_dir=None: give --data-dir, the folder of {release.name}'s four IDX files")
    root = Path(data_dir)
    for folder in (root, *(root / name for name in release.folders)):
        try:
            return find_idx(folder, "train-images", 3).parent
        except DataError:
            continue
    return root


def _flipped(bits: Tensor, chance: float, generator: torch.Generator) -> Tensor:
    return bits ^ (torch.rand(len(bits), generator=generator) < chance)


def _inked(images: np.ndarray, colors: np.ndarray) -> Sequence[np.ndarray]:
    """Gray images (N, 28, 28) -> RGB (N, 28, 28, 3), all in channel 0, red, or 1, green."""
    colored = np.zeros((*images.shape, 3), dtype=np.uint8)
    colored[np.arange(len(images)), :, :, colors.astype(int)] = images
    return list(colored)
