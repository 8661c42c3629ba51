"""Pictures of features in two dimensions, by class and by domain."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..canvas import legend_below, picture, swatch
from ..drawing import fitted
from ..palette import CATEGORIES, category_color
from .evaluated import Evaluated
from .projection import METHODS, TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 3000  # points; more hide each other, and t-SNE takes long


def plot_projection(found: Evaluated, method: str, path: Path) -> None:
    """Draws features as points: colors are classes in one panel, domains in the other; held-out domains as crosses.

    Of more than 16 classes there is no panel, because so many colors cannot be told apart, and of more than 16 domains
    the colors are what they were to the network.

    Args:
        found: An evaluation with features.
        method: A name in `METHODS`.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    total = len(found.answers.group)
    shown = _shown(total)
    points = METHODS[method](found.answers.features.numpy()[shown])
    domain, target = ((found.answers.group // 2).numpy()[shown], found.answers.target.numpy()[shown])
    tested = np.isin(domain, found.test_domains)
    panels = [_by_domain(found, domain)]
    if len(found.classes) <= CATEGORIES:
        panels.insert(0, ("class", target, found.classes))
    with picture(path, 4.2 * len(panels), 5.4) as figure:
        for axes, (name, values, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _scatter(axes, points, values, tested)
            axes.set(title=name, xticks=[], yticks=[])
            present = [at for at in range(len(names)) if (values == at).any()]
            legend_below(axes, [swatch(category_color(at), fitted(names[at], 18)) for at in present])
        number = f"{total} images" if len(shown) == total else f"{len(shown)} of {total} images"
        crosses = "; crosses: not trained on" if tested.any() else ""
        figure.suptitle(f"{TITLES[method]} of features\n{fitted(found.model, 60)}\n{number}{crosses}")


def _shown(total: int) -> np.ndarray:
    """Positions of the images that are drawn, all or a fixed random choice."""
    return np.sort(np.random.default_rng(0).permutation(total)[:MOST])


def _by_domain(found: Evaluated, domain: np.ndarray) -> tuple[str, np.ndarray, Sequence[str]]:
    """What colors stand for, which each image has, and their names."""
    if len(found.domains) <= CATEGORIES:
        return "domain", domain, [each.name for each in found.domains]
    kinds = sorted(set(found.parts))
    return "role of the domain", np.array([kinds.index(found.parts[at]) for at in domain]), kinds


def _scatter(axes: "Axes", points: np.ndarray, values: np.ndarray, tested: np.ndarray) -> None:
    for marker, size, mine in ((".", 20, ~tested), ("x", 14, tested)):
        colors = [category_color(value) for value in values[mine].tolist()]
        axes.scatter(points[mine, 0], points[mine, 1], s=size, c=colors, marker=marker, linewidths=0.8, alpha=0.7)
