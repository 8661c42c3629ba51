"""Domains whose images keep all bands and bits, and the statistics that normalize them."""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..errors import ArgumentError, ImageReadError
from .band_names import RGB, Bands
from .domains import Domain, FileDomain, Split
from .readers.images import has_deep_values

MAX_PROBED = 16  # files of a domain
FAR = 8  # deviations from a mean

_LOGGER = logging.getLogger(__name__)


def with_bands(domains: Sequence[Domain], bands: Bands, dataset: str) -> Sequence[Domain]:
    """Makes domains read these bands of their files. Those of images that are not files have three only, RGB."""
    if bands == RGB:
        return domains
    if not all(isinstance(image, str | bytes) for domain in domains for image in domain.images[:1]):
        remedy = f"images of {dataset} have {RGB} bands; leave it out, or use --dataset folder or place_folder"
        argument = "in_chans" if isinstance(bands, int) else "bands"
        raise ArgumentError.of(argument, bands if isinstance(bands, int) else list(bands), remedy)
    return [replace(domain, bands=bands) for domain in domains]


def deep_share(domain: Domain) -> float:
    """Share of files with other values than 8-bit ones among a few, in equal distances. Their first bytes are read."""
    positions = np.unique(np.linspace(0, len(domain) - 1, MAX_PROBED).astype(int)) if len(domain) else ()
    return float(np.mean([_is_deep(domain, int(position)) for position in positions])) if len(positions) else 0.0


def warn_of_far_values(domains: Sequence[Domain], mean: Sequence[float], std: Sequence[float]) -> None:
    """Warns of domains whose first image is far from the mean of the training images, such as those of another type."""
    for domain in domains:
        try:
            means = _moments((domain, 0))[0] if len(domain) else np.array(mean)
        except ImageReadError:  # refused or left out when it is read
            continue
        if len(means) == len(mean) and (np.abs(means - mean) > FAR * np.asarray(std)).any():
            found, usual = ([float(f"{value:.3g}") for value in values] for values in (means, mean))
            remedy = f"and those of the training images are {usual}; convert them as the training images were"
            _LOGGER.warning("image=%r: the means of its bands are %s, %s", domain.file(0), found, remedy)


class BandStatistics(NamedTuple):
    """Statistics of each band over training images."""

    mean: list[float]
    std: list[float]  # 1 if constant
    low: list[float]  # smallest value
    high: list[float]

    def describe(self) -> str:
        """One line for each band, such as "band 1: 0.0046 to 0.0076, mean 0.0061, deviation 0.00088"."""
        rows = zip(self.low, self.high, self.mean, self.std, strict=True)
        lines = [
            f"  band {band}: {low:.3g} to {high:.3g}, mean {mean:.3g}, deviation {std:.3g}"
            for band, (low, high, mean, std) in enumerate(rows, 1)
        ]
        return "\n".join(lines)


def band_statistics(
    domains: Sequence[Domain], splits: Sequence[Split], training: Iterable[int], workers: int = 1
) -> BandStatistics:
    """Computes each band's statistics over the inside parts of training domains. Images weigh the same."""
    images = [(domains[domain], int(position)) for domain in training for position in splits[domain].inside]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        means, squares, lows, highs = (np.stack(column) for column in zip(*pool.map(_moments, images), strict=True))
    mean, square = means.mean(axis=0), squares.mean(axis=0)
    variance = square - mean**2
    # A constant band's variance is not exactly 0 but what rounding leaves of it.
    constant = variance <= 1e-12 * np.maximum(square, 1e-30)
    std = np.where(constant, 1.0, np.sqrt(np.maximum(variance, 0)))
    return BandStatistics(mean.tolist(), std.tolist(), lows.min(axis=0).tolist(), highs.max(axis=0).tolist())


def _is_deep(domain: Domain, position: int) -> bool:
    if isinstance(domain.images[position], str | bytes):
        return has_deep_values(domain.file(position))
    try:
        return isinstance(domain, FileDomain) and isinstance(domain.pixels(position), Tensor)
    except ImageReadError:
        return False


def _moments(image: tuple[Domain, int]) -> tuple[np.ndarray, ...]:
    """Means of one image's bands and of their squares, and extremes, in float64."""
    domain, position = image
    pixels = domain.pixels(position)
    values = pixels.double().numpy() if isinstance(pixels, Tensor) else np.asarray(pixels).transpose(2, 0, 1) / 255
    pixel = (1, 2)  # the axes; values without data are NaN
    means = np.nanmean(values, axis=pixel), np.nanmean(values**2, axis=pixel)
    return *means, np.nanmin(values, axis=pixel), np.nanmax(values, axis=pixel)
