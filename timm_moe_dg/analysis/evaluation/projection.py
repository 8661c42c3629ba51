"""Features in two dimensions: principal components, t-SNE or UMAP."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType

import numpy as np

from ...errors import ArgumentError, MissingDependencyError


def pca(features: np.ndarray) -> np.ndarray:
    """(N, D) -> (N, 2) along the two directions of largest variance; the largest part of each is positive."""
    centered = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    axes = np.linalg.eigh(centered.T @ centered)[1][:, :-3:-1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), range(axes.shape[1])])
    points = centered @ axes
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))


def tsne(features: np.ndarray) -> np.ndarray:
    """(N, D) -> (N, 2) by scikit-learn's t-SNE, from the principal components, with its default of 30 neighbors."""
    from sklearn.manifold import TSNE

    if len(features) < 3 or features.shape[1] < 2:  # nothing to arrange
        return pca(features)
    perplexity = min(30.0, (len(features) - 1) / 3)
    return TSNE(init="pca", perplexity=perplexity, random_state=0).fit_transform(features)


def umap(features: np.ndarray) -> np.ndarray:
    """(N, D) -> (N, 2) by UMAP, with its default of 15 neighbors."""
    from umap import UMAP

    if len(features) < 5:  # fewer than its spectral start needs
        return pca(features)
    return UMAP(n_neighbors=min(15, len(features) - 1), random_state=0).fit_transform(features)


METHODS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = MappingProxyType({"pca": pca, "tsne": tsne, "umap": umap})
TITLES = MappingProxyType({"pca": "PCA", "tsne": "t-SNE", "umap": "UMAP"})
# method -> module, and what installs it
_NEEDED = {"tsne": ("sklearn", "scikit-learn"), "umap": ("umap", "umap-learn")}


def check_projection(method: str) -> None:
    """Makes sure that a projection can be computed here, before any work is done for it.

    Raises:
        ArgumentError: There is no such method.
        MissingDependencyError: Its package is not installed.
    """
    if method not in METHODS:
        raise ArgumentError.of("projection", method, f"choose from {', '.join(METHODS)}")
    module, package = _NEEDED.get(method, ("numpy", "numpy"))
    if find_spec(module) is None:
        remedy = f"needs {package}, which is not installed: pip install {package}; or give pca"
        raise MissingDependencyError(f"projection={method!r}: {remedy}")
