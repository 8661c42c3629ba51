"""Projections of features, on data whose answer is known."""

import numpy as np
import pytest

from timm_moe_dg.analysis.evaluation_projection import METHODS, pca, tsne


def test_principal_components_are_the_leading_eigenvectors_of_the_covariance_with_a_fixed_sign():
    features = np.random.default_rng(0).normal(size=(50, 6)) * [5, 1, 3, 0.1, 2, 1] + 100
    axes = np.linalg.eigh(np.cov(features.T))[1][:, [-1, -2]]
    axes *= np.sign(axes[np.abs(axes).argmax(0), [0, 1]])  # the largest loading is positive
    assert np.allclose(pca(features), (features - features.mean(0)) @ axes)


@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (3, 1), (40, 2)])
@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_few_images_and_few_features_have_a_place_too(method, shape):
    points = METHODS[method](np.random.default_rng(0).normal(size=shape).astype(np.float32))
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all()


def test_tsne_keeps_what_is_far_apart_apart():
    features = np.random.default_rng(0).normal(size=(40, 5)) + 50 * np.repeat([[0], [1]], 20, axis=0)
    points = tsne(features.astype(np.float32))
    inner = np.linalg.norm(points[:20] - points[:20].mean(0), axis=1).max()
    assert np.linalg.norm(points[:20].mean(0) - points[20:].mean(0)) > inner
