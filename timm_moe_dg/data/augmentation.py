"""timm's augmentations around a data set's own, with all their randomness from torch's generator."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from ..errors import ArgumentError
from .pixels import RGB, Pixels, Transform

_POLICIES = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}


def with_timm_augmentation(
    transform: Transform,
    policy: str | None,
    erasing: float,
    size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
) -> Transform:
    """Puts timm's automatic augmentation before a transform, and its random erasing behind; as it is without both.

    Args:
        transform: Of RGB images, or of as many bands as there are means, to normalized tensors (C, height, width).
        policy: timm's, such as rand-m9-mstd0.5, augmix-m3-w3, original or v0; None for none.
        erasing: Probability that a rectangle is replaced by noise.
        size: Height and width in pixels.
        mean: Per channel, by which the tensors are normalized.
        std: Likewise.

    Raises:
        ArgumentError: timm has no such policy, or the images are not RGB.
    """
    if policy is None and not erasing:
        return transform
    before = None if policy is None else _automatic(policy, min(size), mean)
    behind = RandomErasing(erasing, mode="pixel", device="cpu") if erasing else None
    return TimmAugmented(before, transform, behind)


@dataclass(frozen=True)
class TimmAugmented:
    """See `with_timm_augmentation`; timm draws from Python's and numpy's generators, which are seeded by torch's here.

    Attributes:
        before: Of RGB images, or None.
        transform: The data set's own.
        behind: Of tensors, or None.
    """

    before: Callable[[Pixels], Pixels] | None
    transform: Transform
    behind: Callable[[Tensor], Tensor] | None

    def __call__(self, image: Pixels) -> Tensor:
        """Augments one image."""
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 (what timm draws from, here and below)
        seed = int(torch.randint(2**32, (1,)))
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            tensor = self.transform(self.before(image) if self.before else image)
            return self.behind(tensor) if self.behind else tensor
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002


def _automatic(policy: str, side: int, mean: Sequence[float]) -> Callable[[Pixels], Pixels]:
    """Builds a policy as timm's own loaders do: shifts in shares of the side, gaps filled with the mean color."""
    if len(mean) != RGB:
        raise ArgumentError.of("aa", policy, f"is of RGB images, and these have {len(mean)} bands; leave it out")
    fill = tuple(min(255, round(255 * value)) for value in mean)
    options: dict[str, Any] = {"translate_const": int(side * 0.45), "img_mean": fill}
    try:
        return _POLICIES.get(policy.partition("-")[0], auto_augment_transform)(policy, options)
    except (AssertionError, KeyError, ValueError) as error:
        remedy = "is no policy of timm's; give one such as rand-m9-mstd0.5, augmix-m3-w3 or original"
        raise ArgumentError.of("aa", policy, remedy) from error
