"""What the domain-generalization methods penalize, as functions of features, logits, risks or gradients.

Axes: B samples, D features, C classes, M domains, P parameters. A risk is the mean cross-entropy of a domain, or the
cross-entropy of one sample where it says so.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError

# Widths of the Gaussian kernels exp(-gamma * squared distance) that MMD and RDM sum over
MMD_GAMMAS = tuple(10.0**power for power in range(-3, 4))
RDM_GAMMAS = tuple(10.0**power for power in range(-4, 4))


def irm_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    """Squared gradient of the risk with respect to a dummy scale of the logits, estimated without bias.

    The gradients g(w) = d/dw CE(w * logits, targets) at w = 1 of the even and of the odd samples are multiplied
    (Arjovsky et al., 2019, IRMv1 as its authors estimate it), so one batch can give a negative value.

    Args:
        logits: (B, C) of one domain.
        targets: (B,) class indices.

    Returns:
        Scalar.

    Raises:
        ArgumentError: Fewer than two samples.
    """
    _check_samples("IRM", logits)
    scale = torch.ones((), dtype=logits.dtype, device=logits.device, requires_grad=True)
    halves = [F.cross_entropy(logits[start::2] * scale, targets[start::2]) for start in (0, 1)]
    even, odd = (torch.autograd.grad(half, scale, create_graph=True)[0] for half in halves)
    return even * odd


def vrex_penalty(risks: Tensor) -> Tensor:
    """(M,) risks -> their variance, divided by M (Krueger et al., 2021)."""
    return risks.var(correction=0)


def coral_distance(x: Tensor, y: Tensor) -> Tensor:
    """Mean squared difference of the means plus mean squared difference of the covariances (Sun and Saenko, 2016).

    Args:
        x: (B, D) features of one domain.
        y: (B', D) features of another.

    Returns:
        Scalar: the mean over D entries plus the mean over D * D entries; covariances are divided by B - 1.

    Raises:
        ArgumentError: Fewer than two samples.
    """
    _check_samples("CORAL", x)
    _check_samples("CORAL", y)
    means = (x.mean(0) - y.mean(0)).square().mean()
    return means + (_covariance(x) - _covariance(y)).square().mean()


def _covariance(x: Tensor) -> Tensor:
    centered = x - x.mean(0)
    return centered.T @ centered / (len(x) - 1)


def mmd_distance(x: Tensor, y: Tensor, gammas: Sequence[float] = MMD_GAMMAS) -> Tensor:
    """Squared maximum mean discrepancy with a sum of Gaussian kernels, biased (Li et al., 2018; Gretton et al., 2012).

    mean k(x, x') + mean k(y, y') - 2 mean k(x, y), means over all pairs, a sample with itself among them.

    Args:
        x: (B, D).
        y: (B', D).
        gammas: k(a, b) = sum over these of exp(-gamma * |a - b|^2).

    Returns:
        Scalar, not negative up to rounding.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        # From differences: inner products would cancel where gamma = 1000 magnifies what is left
        squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
        return torch.stack([torch.exp(-gamma * squares).mean() for gamma in gammas]).sum()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def group_weights(weights: Tensor, risks: Tensor, eta: float) -> Tensor:
    """(M,) weights of the domains after one step of exponentiated gradient ascent (Sagawa et al., 2020, algorithm 1).

    Args:
        weights: (M,) positive, of any sum.
        risks: (M,).
        eta: Step size.

    Returns:
        (M,) with sum 1; no gradient flows into the risks.
    """
    weights = weights * torch.exp(eta * risks.detach())
    return weights / weights.sum()


def classifier_gradient_variance(features: Tensor, logits: Tensor, targets: Tensor, bias: bool = True) -> Tensor:
    """Variance over samples of the cross-entropy's gradient with respect to a linear classifier (Rame et al., 2022).

    In closed form: sample i has the gradient (p_i - y_i) outer z_i for the weight and p_i - y_i for the bias, so the
    moments over samples are products of matrices and no gradient of one sample is stored.

    Args:
        features: (B, D) what the classifier was given, z.
        logits: (B, C) what it answered; p is their softmax.
        targets: (B,) class indices, y one-hot.
        bias: Whether the classifier has one.

    Returns:
        (P,) variances divided by B, the weight's C * D first, the bias's C last; connected to features and logits.
    """
    residual = logits.softmax(1) - F.one_hot(targets, logits.shape[1])
    if bias:
        features = torch.cat([features, features.new_ones(len(features), 1)], dim=1)
    mean = residual.T @ features / len(features)
    variance = residual.square().T @ features.square() / len(features) - mean.square()
    if not bias:
        return variance.flatten()
    return torch.cat([variance[:, :-1].flatten(), variance[:, -1]])


def fishr_penalty(variances: Tensor) -> Tensor:
    """(M, P) gradient variances -> mean over domains and parameters of (variance - mean over domains)^2 (Fishr)."""
    return (variances - variances.mean(0)).square().mean()


def rdm_penalties(risks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """How the worst domain's risks differ from all, and how much risks vary (Nguyen et al., 2024).

    Args:
        risks: Of each domain, the cross-entropy of each sample, (B,).

    Returns:
        The squared discrepancy of `mmd_distance`, with kernels `RDM_GAMMAS`, between the samples' risks in the domain
        with the largest mean and those in all domains; and the sum of the unbiased variances of the two. Scalars.

    Raises:
        ArgumentError: A domain has fewer than two samples.
    """
    for domain in risks:
        _check_samples("RDM", domain)
    worst = max(risks, key=lambda domain: domain.mean().item())
    everywhere = torch.cat(list(risks))
    matching = mmd_distance(worst.unsqueeze(1), everywhere.unsqueeze(1), RDM_GAMMAS)
    return matching, everywhere.var() + worst.var()


def class_balanced_cross_entropy(logits: Tensor, targets: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Cross-entropy in which every class of images weighs alike, however many images it has (CDANN).

    Args:
        logits: (B, M) of the domains.
        targets: (B,) domain indices.
        classes: (B,) class indices.
        num_classes: All classes, also those that no image here has.

    Returns:
        Scalar: the sum over samples of the cross-entropy / (images of its class here * num_classes).
    """
    counts = torch.bincount(classes, minlength=num_classes)[classes]
    return (F.cross_entropy(logits, targets, reduction="none") / (counts * num_classes)).sum()


def input_gradient_penalty(loss: Tensor, inputs: Tensor) -> Tensor:
    """Mean over samples of the squared norm of a summed loss's gradient with respect to its inputs (B, D)."""
    (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return gradient.square().sum(1).mean()


def spectral_decoupling(logits: Tensor) -> Tensor:
    """(B, C) logits -> mean of their squares (Pezeshki et al., 2021)."""
    return logits.square().mean()


def feature_divergence(features: Tensor, reference: Tensor, variance: Tensor) -> Tensor:
    """How far features went from a frozen network's: mean of ((f - f0)^2 / v + log v) / 2 (Cha et al., 2022).

    Args:
        features: Any shape, f.
        reference: The same shape, f0.
        variance: Positive, broadcast to that shape, v.

    Returns:
        Scalar, the Gaussian negative log-likelihood without its constant.
    """
    return ((features - reference).square() / variance + variance.log()).mean() / 2


def _check_samples(method: str, values: Tensor) -> None:
    if len(values) < 2:
        raise ArgumentError.of("batch_size", len(values), f"{method} needs 2 images per domain in every forward pass")
