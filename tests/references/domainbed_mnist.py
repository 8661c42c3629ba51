"""RotatedMNIST and ColoredMNIST derived once more, pixel by pixel, from DomainBed's description of them.

Floats in 0..1, in DomainBed's channels. The random numbers come from torch's global generator, as there.
"""

import math

import torch
from torch import Tensor


def shuffled(images: Tensor, labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Seeds the global generator, as DomainBed's script does, and draws the one permutation."""
    torch.manual_seed(seed)
    order = torch.randperm(len(images)).tolist()
    return torch.stack([images[index] for index in order]), torch.stack([labels[index] for index in order])


def rotated(images: Tensor, labels: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Six pairs of images (n, 1, 28, 28) and labels (n,)."""
    images, labels = shuffled(images, labels, seed)
    domains = []
    for position, angle in enumerate((0, 15, 30, 45, 60, 75)):
        members = range(position, len(images), 6)
        turned = torch.stack([turn(images[index], angle) for index in members]) if members else torch.zeros(0, 28, 28)
        domains.append((turned[:, None], torch.stack([labels[index] for index in members])))
    return domains


def turn(image: Tensor, degrees: int) -> Tensor:
    """Looks up, for every pixel, where it was before turning counter-clockwise, and weighs its four neighbors.

    Values are whole numbers of 255ths, cut off as PIL cuts them; outside is black, and the edge repeats its neighbor.
    """
    size = len(image)
    center, angle = size / 2, math.radians(degrees)
    pixels = image.double().tolist()
    out = torch.zeros(size, size)
    for row in range(size):
        for column in range(size):
            x, y = column + 0.5 - center, row + 0.5 - center
            from_x = math.cos(angle) * x - math.sin(angle) * y + center
            from_y = math.sin(angle) * x + math.cos(angle) * y + center
            out[row, column] = interpolated(pixels, from_x, from_y)
    return out / 255


def interpolated(pixels: list[list[float]], x: float, y: float) -> float:
    """The value at a point, whose pixel (0, 0) covers 0..1."""
    size = len(pixels)
    if not (0 <= x < size and 0 <= y < size):
        return 0.0
    left, top = math.floor(x - 0.5), math.floor(y - 0.5)
    right_share, bottom_share = x - 0.5 - left, y - 0.5 - top

    def pixel(row: int, column: int) -> float:
        return pixels[min(max(row, 0), size - 1)][min(max(column, 0), size - 1)]

    above = pixel(top, left) * (1 - right_share) + pixel(top, left + 1) * right_share
    below = pixel(top + 1, left) * (1 - right_share) + pixel(top + 1, left + 1) * right_share
    return float(int(above * (1 - bottom_share) + below * bottom_share))


def colored(images: Tensor, digits: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Three pairs of images (n, 2, 28, 28) and labels (n,), one image after the other."""
    images, digits = shuffled(images, digits, seed)
    domains = []
    for position, noise in enumerate((0.1, 0.2, 0.9)):
        members = range(position, len(images), 3)
        label_noise = (torch.rand(len(members)) < 0.25).tolist()
        color_noise = (torch.rand(len(members)) < noise).tolist()
        channels, labels = torch.zeros(len(members), 2, 28, 28), []
        for number, index in enumerate(members):
            label = int(digits[index] < 5)
            label = 1 - label if label_noise[number] else label
            color = 1 - label if color_noise[number] else label
            channels[number, color] = images[index].float() / 255
            labels.append(label)
        domains.append((channels, torch.tensor(labels)))
    return domains
