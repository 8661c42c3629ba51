"""Domains of which all bands reach the network, and what these are normalized by."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from ..errors import ArgumentError
from .domains import Domain, Split
from .pixels import RGB


def with_bands(domains: Sequence[Domain], bands: int, dataset: str) -> Sequence[Domain]:
    """Returns the same domains with all bands of their files; with three, as they are.

    Args:
        domains: Of a benchmark.
        bands: How many every file must have.
        dataset: The benchmark's name.

    Raises:
        ArgumentError: Images of this benchmark are no files, and so RGB.
    """
    if bands == RGB:
        return domains
    if not all(isinstance(stored, str) for domain in domains for stored in domain.images[:1]):
        remedy = f"images of {dataset} have {RGB} bands; leave it out, or use --dataset folder or place_folder"
        raise ArgumentError.of("in_chans", bands, remedy)
    return [replace(domain, bands=bands) for domain in domains]


def band_statistics(
    domains: Sequence[Domain], splits: Sequence[Split], training: Iterable[int], workers: int = 1
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each band over the pixels of all images that are trained on, each image alike.

    Args:
        domains: All domains of a benchmark.
        splits: One per domain; the inside parts count.
        training: Positions of the domains that are trained on.
        workers: Threads to read with.

    Returns:
        As many means and deviations as there are bands; 1 for the deviation of a band that is the same everywhere.

    Raises:
        ImageReadError: An image cannot be used.
    """
    where = [(domains[at], int(position)) for at in training for position in splits[at].inside]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        moments = list(pool.map(_moments, where))
    means, squares = (np.mean(column, axis=0) for column in zip(*moments, strict=True))
    variance = squares - means**2
    # What rounding leaves of a band without any variance
    same = variance <= 1e-12 * np.maximum(squares, 1e-30)
    return means.tolist(), np.where(same, 1.0, np.sqrt(np.maximum(variance, 0))).tolist()


def _moments(where: tuple[Domain, int]) -> tuple[np.ndarray, np.ndarray]:
    """Means of an image's bands and of their squares, in float64."""
    domain, position = where
    values = np.asarray(domain.pixels(position), dtype=np.float64)
    return values.mean(axis=(1, 2)), (values**2).mean(axis=(1, 2))
