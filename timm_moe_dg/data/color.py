"""Color jitter of float images: torchvision's distribution and definitions, written for the speed of a loader.

Images are (3, height, width) floats in 0..1. Every function returns a new image. Factors and their random order are
drawn by torchvision itself; only the arithmetic differs: PIL rounds to 256 levels after each of the four adjustments
and hues to 256 as well, these round nowhere, and the hue needs no way to HSV and back.
"""

from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

RED, GREEN, BLUE = 0.2989, 0.587, 0.114  # luma (ITU-R BT.601), as torchvision weighs it
SMALLEST = 1e-12  # divides the zero differences of a gray pixel


class ColorJitter(v2.ColorJitter):
    """Adjusts brightness, contrast, saturation and hue, each by a random factor, in a random order."""

    def transform(self, inpt: Tensor, params: dict[str, Any]) -> Tensor:
        """Applies the factors that `make_params` drew."""
        for position in params["fn_idx"]:
            adjust = (brightness, contrast, saturation, hue)[position]
            inpt = adjust(inpt, params[f"{adjust.__name__}_factor"])
        return inpt


def brightness(image: Tensor, factor: float) -> Tensor:
    """Blends with black; a factor of 1 changes nothing, 0 is black."""
    return image.mul(factor).clamp_(0, 1)


def contrast(image: Tensor, factor: float) -> Tensor:
    """Blends with the image's mean gray; a factor of 1 changes nothing, 0 is that gray."""
    return image.mul(factor).add_(_luma(image).mean(), alpha=1 - factor).clamp_(0, 1)


def saturation(image: Tensor, factor: float) -> Tensor:
    """Blends with each pixel's gray; a factor of 1 changes nothing, 0 is a gray image."""
    return image.mul(factor).add_(_luma(image), alpha=1 - factor).clamp_(0, 1)


def hue(image: Tensor, shift: float) -> Tensor:
    """Turns every pixel's hue, by -0.5 to 0.5 of the color circle; largest and smallest channel values stay.

    With the hue h in sixths of the circle, 0 at red, a channel is `low + (high - low) * weight`, where the weight is a
    trapezium in h: |h - 3| - 1 for red, 2 - |h - 2| for green and 2 - |h - 4| for blue, cut off at 0 and 1.
    """
    red, green, blue = image
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    spread = high - low
    scale = spread.clamp(min=SMALLEST).reciprocal_()
    below_blue = torch.where(high == green, (blue - red).mul_(scale).add_(2), (red - green).mul_(scale).add_(4))
    sixth = torch.where(high == red, (green - blue).mul_(scale), below_blue).add_(6 * shift)
    sixth.sub_(sixth.div(6).floor_(), alpha=6)
    turned = torch.empty_like(image)
    torch.sub(sixth, 3, out=turned[0]).abs_().sub_(1)
    torch.sub(sixth, 2, out=turned[1]).abs_().neg_().add_(2)
    torch.sub(sixth, 4, out=turned[2]).abs_().neg_().add_(2)
    return turned.clamp_(0, 1).mul_(spread).add_(low)


def _luma(image: Tensor) -> Tensor:
    return image[0].mul(RED).add_(image[1], alpha=GREEN).add_(image[2], alpha=BLUE)
