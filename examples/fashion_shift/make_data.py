"""Writes the images of docs/results/fashion_shift.md as two folders of domains.

    python examples/fashion_shift/make_data.py FASHION_MNIST DATA

FASHION_MNIST is the folder of the four published files, such as /usr/share/datasets/fashion-mnist of Debian's package
dataset-fashion-mnist. DATA/pretraining gets the 60,000 training images as they are. The 10,000 test images are shuffled
and dealt to the four domains of DATA/shift, so that no piece of clothing is in two of them.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import rotate

from timm_moe_dg.data.readers.digits import FASHION_MNIST, read_images_and_labels

TRAINING_IMAGES = 60_000
NOISE = 0.15  # standard deviation, where white is 1


def turned(degrees: int, image: np.ndarray) -> Image.Image:
    """Returns the image turned counter-clockwise, with black corners."""
    return rotate(Image.fromarray(image), degrees, InterpolationMode.BILINEAR, fill=[0])


def noisy(image: np.ndarray, generator: np.random.Generator) -> Image.Image:
    """Returns the image with Gaussian noise on each pixel."""
    pixels = image + 255 * NOISE * generator.standard_normal(image.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def colored(image: np.ndarray, generator: np.random.Generator) -> Image.Image:
    """Returns the image between two random colors, a dark one for black and a bright one for white."""
    black, white = generator.uniform(0, 100, 3), generator.uniform(100, 255, 3)
    share = image[..., None] / 255
    return Image.fromarray(((1 - share) * black + share * white).astype(np.uint8))


def main(source: str, target: str) -> None:
    """Writes both folders."""
    images, labels = read_images_and_labels(Path(source), len(FASHION_MNIST.classes))
    generator = np.random.default_rng(0)
    order = np.arange(len(images))
    order[TRAINING_IMAGES:] = generator.permutation(order[TRAINING_IMAGES:])
    domains: dict[str, Callable[[np.ndarray], Image.Image]] = {
        "shift/colored": lambda image: colored(image, generator),
        "shift/noisy": lambda image: noisy(image, generator),
        "shift/rotated_30": lambda image: turned(30, image),
        "shift/rotated_60": lambda image: turned(60, image),
    }
    write(Path(target, "pretraining/upright"), images, labels, order[:TRAINING_IMAGES], Image.fromarray)
    for position, (name, change) in enumerate(domains.items()):
        write(Path(target, name), images, labels, order[TRAINING_IMAGES + position :: len(domains)], change)


def write(
    folder: Path,
    images: np.ndarray,
    labels: np.ndarray,
    members: np.ndarray,
    change: Callable[[np.ndarray], Image.Image],
) -> None:
    """Writes the changed members into a folder for each class."""
    names = [name.replace("/", " or ") for name in FASHION_MNIST.classes]
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for member in members:
        change(images[member]).convert("RGB").save(folder / names[labels[member]] / f"{member:05}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
