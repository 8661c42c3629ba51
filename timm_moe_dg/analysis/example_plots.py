"""Examples of a data set: images by domain and class, without a trained network."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..data import Domain
from .style import image_grid


def plot_examples(domains: Sequence[Domain], path: Path, columns: int) -> None:
    """Draws the first image of each of the first `columns` classes, a row for each domain."""
    classes = domains[0].classes[:columns]
    with image_grid(path, [domain.name for domain in domains], classes) as (_, panels):
        for domain, row in zip(domains, panels, strict=True):
            for target, axes in enumerate(row):
                positions = np.flatnonzero(np.asarray(domain.targets) == target)
                if len(positions):  # a domain may lack a class
                    axes.imshow(domain.image(int(positions[0])))
