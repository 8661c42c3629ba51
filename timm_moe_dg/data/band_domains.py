"""Domains whose images keep all bands, and the statistics that normalize these bands."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from ..errors import ArgumentError
from .bands import RGB
from .domains import Domain, Split


def with_bands(domains: Sequence[Domain], bands: int, dataset: str) -> Sequence[Domain]:
    """Makes domains read so many bands of their files. Those of images that are not files have three only."""
    if bands == RGB:
        return domains
    if not all(isinstance(image, str | bytes) for domain in domains for image in domain.images[:1]):
        remedy = f"images of {dataset} have {RGB} bands; leave it out, or use --dataset folder or place_folder"
        raise ArgumentError.of("in_chans", bands, remedy)
    return [replace(domain, bands=bands) for domain in domains]


def band_statistics(
    domains: Sequence[Domain], splits: Sequence[Split], training: Iterable[int], workers: int = 1
) -> tuple[list[float], list[float]]:
    """Computes each band's mean and standard deviation (1 if constant) over the inside parts. Images weigh the same."""
    images = [(domains[domain], int(position)) for domain in training for position in splits[domain].inside]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        moments = list(pool.map(_moments, images))
    means, squares = (np.mean(column, axis=0) for column in zip(*moments, strict=True))
    variance = squares - means**2
    # A constant band's variance is not exactly 0 but what rounding leaves of it.
    constant = variance <= 1e-12 * np.maximum(squares, 1e-30)
    return means.tolist(), np.where(constant, 1.0, np.sqrt(np.maximum(variance, 0))).tolist()


def _moments(image: tuple[Domain, int]) -> tuple[np.ndarray, np.ndarray]:
    """Means of one image's bands and of their squares, in float64."""
    domain, position = image
    values = np.asarray(domain.pixels(position), dtype=np.float64)
    return values.mean(axis=(1, 2)), (values**2).mean(axis=(1, 2))
