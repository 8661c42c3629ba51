"""Features in two dimensions by PCA or t-SNE, drawn by class and by domain."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from .evaluated import Evaluated
from .style import CATEGORIES, category_color, fitted, picture, swatch

MAX_POINTS = 3000  # more points hide each other, and t-SNE takes long


def pca(features: np.ndarray) -> np.ndarray:
    """Projects on the two directions of largest variance: (N, D) -> (N, 2)."""
    from sklearn.decomposition import PCA

    if len(features) < 2:  # no variance
        return np.zeros((len(features), 2))
    components = min(2, *features.shape)
    # Its sign rule makes the largest loading of each direction positive
    points = PCA(components, svd_solver="full").fit_transform(features.astype(np.float64))
    return np.pad(points, ((0, 0), (0, 2 - components)))


def tsne(features: np.ndarray) -> np.ndarray:
    """Embeds by t-SNE, initialized with the principal components, perplexity 30: (N, D) -> (N, 2)."""
    from sklearn.manifold import TSNE

    if len(features) < 3 or features.shape[1] < 2:  # too few for t-SNE
        return pca(features)
    perplexity = min(30.0, (len(features) - 1) / 3)
    return TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(features)


METHODS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType({"pca": pca, "tsne": tsne})
TITLES = MappingProxyType({"pca": "PCA", "tsne": "t-SNE"})


def plot_projection(evaluated: Evaluated, method: str, path: Path) -> None:
    """Draws features as points, by class in one panel and by domain in the other. Test images are crosses.

    More than 16 classes get no panel. With more than 16 domains, colors show the domain's role in training.
    """
    total = len(evaluated.outputs.group)
    # The seed is fixed, so that the picture is the same each time
    selected = np.sort(np.random.default_rng(0).permutation(total)[:MAX_POINTS])
    points = METHODS[method](evaluated.outputs.features.numpy()[selected])
    domain, target = (evaluated.outputs.group // 2).numpy()[selected], evaluated.outputs.target.numpy()[selected]
    is_test = np.isin(domain, evaluated.test_domains)
    panels: list[tuple[str, np.ndarray, Sequence[str]]] = []  # title, color of each image, and names of the colors
    if len(evaluated.classes) <= CATEGORIES:
        panels.append(("class", target, evaluated.classes))
    if len(evaluated.domains) <= CATEGORIES:
        panels.append(("domain", domain, [domain.name for domain in evaluated.domains]))
    else:
        kinds, kind_of = np.unique(evaluated.domain_roles, return_inverse=True)
        panels.append(("role of the domain", kind_of[domain], kinds.tolist()))
    with picture(path, 4.2 * len(panels), 5.4) as figure:
        for axes, (title, values, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for marker, size, rows in ((".", 20, ~is_test), ("x", 14, is_test)):
                colors = [category_color(value) for value in values[rows].tolist()]
                axes.scatter(*points[rows].T, s=size, c=colors, marker=marker, linewidths=0.8, alpha=0.7)
            axes.set(title=title, xticks=[], yticks=[])
            present = [index for index in range(len(names)) if (values == index).any()]
            handles = [swatch(category_color(index), fitted(names[index], 18)) for index in present]
            axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2, columnspacing=1.0)
        number = f"{total} images" if len(selected) == total else f"{len(selected)} of {total} images"
        crosses = "; crosses: not trained on" if is_test.any() else ""
        figure.suptitle(f"{TITLES[method]} of features\n{fitted(evaluated.model, 60)}\n{number}{crosses}")
