"""From an RGB image or bands to the tensor that a model takes: augmented for training, plain for evaluation."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from ..errors import ArgumentError
from .color import ColorJitter
from .pixels import RGB, Pixels, Transform


def _photograph_augmentation(size: tuple[int, int], channels: int = RGB) -> list[Callable]:
    """DomainBed's: crop of 70 to 100% of the area, mirror, color jitter, gray one time in ten.

    Jitter and gray are defined for RGB; images of other bands are cropped and mirrored alone.

    The draws are torchvision's; the pixels differ from those of its PIL transforms by rounding alone (one level in the
    crop; see `color`), and take less than half the time.
    """
    geometric = [_pixels, v2.RandomResizedCrop(size, scale=(0.7, 1.0)), v2.RandomHorizontalFlip()]
    of_color = [v2.ToDtype(torch.float32, scale=True), ColorJitter(0.3, 0.3, 0.3, 0.3), v2.RandomGrayscale(0.1)]
    return [*geometric, *(of_color if channels == RGB else ())]


def _digit_augmentation(size: tuple[int, int], channels: int = RGB) -> list[Callable]:
    """The crop alone: a mirrored digit is another sign, and ink has no color."""
    return [v2.RandomResizedCrop(size, scale=(0.7, 1.0))]


def _no_augmentation(size: tuple[int, int], channels: int = RGB) -> list[Callable]:
    """The whole image, as in evaluation; DomainBed's colored and rotated digits are not augmented."""
    return [v2.Resize(size)]


AUGMENTATIONS: Mapping[str, Callable[..., list[Callable]]] = {
    "photograph": _photograph_augmentation,
    "digit": _digit_augmentation,
    "none": _no_augmentation,
}


def training_transform(
    augmentation: str, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> Transform:
    """Builds the training transform; all its randomness comes from torch's global CPU generator.

    Args:
        augmentation: A name in `AUGMENTATIONS`.
        size: Height and width of the result, in pixels.
        mean: Per channel, from the model's data configuration.
        std: Per channel, likewise.

    Returns:
        A function of an RGB image, or of as many bands as there are means, that returns a float tensor (channels,
        height, width).

    Raises:
        ArgumentError: There is no such augmentation.
    """
    if augmentation not in AUGMENTATIONS:
        raise ArgumentError.of("augmentation", augmentation, f"choose from {', '.join(AUGMENTATIONS)}")
    return v2.Compose([*AUGMENTATIONS[augmentation](size, len(mean)), *_to_tensor(mean, std)])


def evaluation_transform(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Builds the evaluation transform: the whole image squeezed to `size`, bilinear, as DomainBed evaluates."""
    return v2.Compose([v2.Resize(size), *_to_tensor(mean, std)])


def _pixels(image: Pixels) -> Tensor:
    """An RGB image as uint8 (3, height, width), in the image's own memory layout, which torchvision resizes fastest."""
    if isinstance(image, Tensor):
        return image
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[Callable]:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
