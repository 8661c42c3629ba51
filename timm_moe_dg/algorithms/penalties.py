"""Penalties of domain-generalization methods, as functions of features, logits, risks or gradients.

A risk is the mean cross-entropy of a domain, unless stated otherwise.

Axes: B samples, D features, C classes, M domains, P parameters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError

# Gaussian kernels exp(-gamma * squared distance)
MMD_GAMMAS = tuple(10.0**power for power in range(-3, 4))
RDM_GAMMAS = tuple(10.0**power for power in range(-4, 4))


def irm_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    """Squared gradient of the risk with respect to a dummy scale of the logits (Arjovsky et al., 2019, IRMv1).

    The estimate for the (B, C) logits and (B,) class indices of one domain, B >= 2, is unbiased, as in the authors'
    code, and may be negative. It is the product of the gradients d/dw CE(w * logits, targets) at w = 1 of the even and
    of the odd samples.
    """
    _check_samples("IRM", logits)
    scale = torch.ones((), dtype=logits.dtype, device=logits.device, requires_grad=True)
    halves = [F.cross_entropy(logits[start::2] * scale, targets[start::2]) for start in (0, 1)]
    even, odd = (torch.autograd.grad(half, scale, create_graph=True)[0] for half in halves)
    return even * odd


def coral_distance(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared difference of the means plus mean squared difference of the covariances (Sun and Saenko, 2016).

    The features are (B, D) of one domain and (B', D) of another, two samples or more each. The means are over D and
    over D * D entries. Covariances are divided by B - 1.
    """
    _check_samples("CORAL", x)
    _check_samples("CORAL", y)
    means = (x.mean(0) - y.mean(0)).square().mean()
    return means + (_covariance(x) - _covariance(y)).square().mean()


def _covariance(x: Tensor) -> Tensor:
    centered = x - x.mean(0)  # not torch.cov, which waits for the device
    return centered.T @ centered / (len(x) - 1)


def mmd_distance(x: Tensor, y: Tensor, gammas: Sequence[float] = MMD_GAMMAS) -> Tensor:
    """Squared maximum mean discrepancy with a sum of Gaussian kernels, biased (Li et al., 2018; Gretton et al., 2012).

    For x (B, D) and y (B', D): mean k(x, x') + mean k(y, y') - 2 mean k(x, y), at least 0 up to rounding. The means
    are over all pairs, including equal samples, and k(a, b) is the sum over gammas of exp(-gamma * |a - b|^2).
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        # Distances from inner products would cancel, and gamma = 1000 would magnify the rounding errors
        squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([torch.exp(-gamma * squares).mean() for gamma in gammas]).sum()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def classifier_gradient_variance(features: Tensor, logits: Tensor, targets: Tensor, bias: bool = True) -> Tensor:
    """Variance over samples of the cross-entropy's gradient with respect to a linear classifier (Rame et al., 2022).

    Features (B, D), the classifier's input, its logits (B, C), and class indices (B,) give (P,) population variances of
    the weight's C * D entries, then of the bias's C unless `bias` is False. They are differentiable with respect to
    features and logits.
    """
    # Sample i has the gradient (p_i - y_i) outer z_i for the weight and p_i - y_i for the bias. The moments over
    # samples are therefore matrix products, and no gradient of a single sample is stored.
    residual = logits.softmax(1) - F.one_hot(targets, logits.shape[1])
    if bias:
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
    mean = residual.T @ features / len(features)
    variance = residual.square().T @ features.square() / len(features) - mean.square()
    if not bias:
        return variance.flatten()
    return torch.cat([variance[:, :-1].flatten(), variance[:, -1]])


def rdm_penalties(risks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Risk distribution matching: the worst domain's risks against those of all domains (Nguyen et al., 2024).

    `risks` holds the cross-entropies (B,) of each domain's samples, two or more. The first scalar returned is the
    `mmd_distance`, with kernels `RDM_GAMMAS`, between the risks of the domain with the largest mean and the risks of
    all domains. The second is the sum of their unbiased variances.
    """
    for domain in risks:
        _check_samples("RDM", domain)
    means = torch.stack([domain.mean() for domain in risks])
    if len({len(domain) for domain in risks}) == 1:  # selected without a wait for the device
        worst = torch.stack(list(risks)).index_select(0, means.argmax().view(1))[0]
    else:
        worst = risks[int(means.argmax())]
    everywhere = torch.cat(list(risks))
    matching = mmd_distance(worst.unsqueeze(1), everywhere.unsqueeze(1), RDM_GAMMAS)
    return matching, everywhere.var() + worst.var()


def _check_samples(method: str, values: Tensor) -> None:
    if len(values) < 2:
        raise ArgumentError.of("batch_size", len(values), f"{method} needs 2 images per domain in every forward pass")
