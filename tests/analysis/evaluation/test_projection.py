"""Projections: principal components by their definition, and what is missing is said before the work."""

import numpy as np
import pytest

from timm_moe_dg.analysis.evaluation import projection
from timm_moe_dg.analysis.evaluation.projection import METHODS, check_projection, pca, tsne
from timm_moe_dg.errors import ArgumentError, MissingDependencyError


def test_principal_components_are_those_of_scikit_learn_up_to_their_signs():
    decomposition = pytest.importorskip("sklearn.decomposition")
    features = np.random.default_rng(0).normal(size=(50, 6)) * [5, 1, 3, 0.1, 2, 1] + 100
    found, expected = pca(features), decomposition.PCA(2).fit_transform(features)
    assert np.allclose(np.abs(found), np.abs(expected), atol=1e-6)
    assert np.allclose(pca(features + 7), found)


@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (3, 1), (40, 2)])
@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_few_images_and_few_features_have_a_place_too(method, shape):
    points = METHODS[method](np.random.default_rng(0).normal(size=shape).astype(np.float32))
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all()


def test_tsne_keeps_what_is_far_apart_apart():
    pytest.importorskip("sklearn")
    features = np.random.default_rng(0).normal(size=(40, 5)) + 50 * np.repeat([[0], [1]], 20, axis=0)
    points = tsne(features.astype(np.float32))
    inner = np.linalg.norm(points[:20] - points[:20].mean(0), axis=1).max()
    assert np.linalg.norm(points[:20].mean(0) - points[20:].mean(0)) > inner


def test_what_cannot_be_computed_is_said_at_once(monkeypatch):
    with pytest.raises(ArgumentError, match="projection='mds': choose from pca, tsne, umap"):
        check_projection("mds")
    monkeypatch.setattr(projection, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(MissingDependencyError, match="needs scikit-learn, which is not installed: pip install scikit"):
        check_projection("tsne")
    check_projection("pca")
