"""Transforms from an image to the tensor that a model takes: augmented for training, plain for evaluation."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import v2

from ..errors import ArgumentError
from .bands import RGB
from .readers.images import Pixels, Transform


def _photograph_augmentation(size: tuple[int, int], channels: int = RGB) -> list[Callable]:
    """DomainBed's: crop of 70 to 100% of the area, mirror, color jitter, gray one time in ten."""
    # DomainBed transforms PIL images, which rounds to 256 levels after each step. Tensors draw the same and round less.
    # PILToTensor keeps channels last in memory, which torchvision resizes fastest.
    geometric = [v2.PILToTensor(), v2.RandomResizedCrop(size, scale=(0.7, 1.0)), v2.RandomHorizontalFlip()]
    color = [v2.ToDtype(torch.float32, scale=True), v2.ColorJitter(0.3, 0.3, 0.3, 0.3), v2.RandomGrayscale(0.1)]
    # Jitter and gray are defined for RGB only, and clip values of more than 8 bits.
    return [*geometric, *([partial(_on_eight_bits, v2.Compose(color))] if channels == RGB else ())]


AUGMENTATIONS: Mapping[str, Callable[..., list[Callable]]] = {
    "photograph": _photograph_augmentation,
    # The crop alone: a mirrored digit is another sign, and ink has no color
    "digit": lambda size, channels=RGB: [v2.RandomResizedCrop(size, scale=(0.7, 1.0))],
    # As in evaluation. DomainBed does not augment colored and rotated digits
    "none": lambda size, channels=RGB: [v2.Resize(size)],
}
_AUTO_AUGMENTATIONS = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}


def training_transform(
    augmentation: str, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]
) -> Transform:
    """Builds the training transform. All its randomness comes from torch's global CPU generator.

    It turns an RGB image, or as many bands as there are means, into a float tensor (channels, height, width) of `size`
    pixels, normalized by `mean` and `std`.
    """
    if augmentation not in AUGMENTATIONS:
        raise ArgumentError.of("augmentation", augmentation, f"choose from {', '.join(AUGMENTATIONS)}")
    return v2.Compose(
        [partial(_fill_missing, mean), *AUGMENTATIONS[augmentation](size, len(mean)), *_to_tensor(mean, std)]
    )


def evaluation_transform(size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Builds the evaluation transform: the whole image squeezed to `size`, bilinear, as DomainBed evaluates."""
    return v2.Compose([partial(_fill_missing, mean), v2.Resize(size), *_to_tensor(mean, std)])


def with_timm_augmentation(
    transform: Transform, policy: str | None, erasing: float, size: Sequence[int], mean: Sequence[float]
) -> Transform:
    """Adds timm's automatic augmentation before a transform and its random erasing after it, if either is given.

    `policy` is timm's name, such as rand-m9-mstd0.5. `erasing` is the probability that noise replaces a rectangle.
    """
    if policy is None and not erasing:
        return transform
    before = None if policy is None else _auto_augmentation(policy, min(size), mean)
    after = RandomErasing(erasing, mode="pixel", device="cpu") if erasing else None
    return partial(_augmented, before, transform, after)


def _augmented(
    before: Callable[[Pixels], Pixels] | None,
    transform: Transform,
    after: Callable[[Tensor], Tensor] | None,
    image: Pixels,
) -> Tensor:
    """Transforms between two of timm's augmentations. All randomness comes from torch's global CPU generator."""
    if before and isinstance(image, Tensor):
        raise ArgumentError("aa: is defined for images of 8 bits, and these have more; leave it out")
    # timm draws from the global generators of Python and numpy. Both are seeded from torch's here and restored, so
    # that a resumed run draws the same.
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    seed = int(torch.randint(2**32, (1,)))
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        tensor = transform(before(image) if before else image)
        return after(tensor) if after else tensor
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _auto_augmentation(policy: str, side: int, mean: Sequence[float]) -> Callable[[Pixels], Pixels]:
    """Builds a policy as timm's own loaders do: shifts in shares of the side, gaps filled with the mean color."""
    if len(mean) != RGB:
        raise ArgumentError.of("aa", policy, f"needs RGB images, and these have {len(mean)} bands; leave it out")
    fill = tuple(min(255, round(255 * value)) for value in mean)
    options: dict[str, Any] = {"translate_const": int(side * 0.45), "img_mean": fill}
    name = policy.partition("-")[0]
    if name == "augmix":  # which timm shifts by less than the 0.45 of other policies
        options["translate_pct"] = 0.3
    try:
        return _AUTO_AUGMENTATIONS.get(name, auto_augment_transform)(policy, options)
    except (AssertionError, KeyError, ValueError) as error:
        remedy = "timm has no such policy; give one such as rand-m9-mstd0.5, augmix-m3-w3 or original"
        raise ArgumentError.of("aa", policy, remedy) from error


def _fill_missing(mean: Sequence[float], image: Pixels) -> Pixels:
    """Gives values without data (NaN) the mean of their band. Resizing would spread them to all around."""
    if not isinstance(image, Tensor) or not image.is_floating_point():
        return image
    return torch.where(image.isnan(), image.new_tensor(mean)[:, None, None], image)


def _on_eight_bits(transform: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Transforms images of 8 bits, and leaves others as they are."""
    return image if image.is_floating_point() else transform(image)


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[Callable]:
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(mean), list(std))]
