"""Fitting the calibration of a trained network: its temperature, and the distribution of its training images."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from ..data import Domain, EvaluationImages, Split, evaluation_loader
from ..errors import ArgumentError, DataError
from .build import Network
from .calibration import Calibration, Distribution, Scores, identify, pixel_statistics
from .ensemble import Ensemble, evaluation_view
from .trained import WithFeatures, class_positions, takes_metadata

SAMPLE = 1000  # images that represent the training images of a domain, or a domain that was held out
TYPICAL = 0.995  # share of validation images within each of two distributions: at least 99% are within both
_LOG_RANGE = (math.log(0.01), math.log(100.0))  # of temperatures


@torch.inference_mode()
def calibrate(
    network: Network,
    domains: Sequence[Domain],
    splits: Sequence[Split],
    training: Sequence[int],
    held_out: Sequence[int],
    *,
    method: str,
    metadata_columns: Sequence[str] | None,
    batch_size: int,
    workers: int,
    watched: Callable[[DataLoader], Any] = iter,
) -> Calibration:
    """Fits a calibration in one pass over images, on the network's device.

    Args:
        network: In evaluation mode.
        domains: All domains.
        splits: Those of the run.
        training: Positions of the training domains. Their out-splits are the validation images.
        held_out: Positions of the domains that are new to the network.
        method: See `Calibration`.
        metadata_columns: Columns that the network reads after longitude and latitude.
        batch_size: Of the pass.
        workers: Processes that load images.
        watched: Wraps the loader, and may end the pass by an exception.

    Raises:
        DataError: No training domain has validation images.
    """
    parts = [Split(np.arange(0), np.arange(0))] * len(domains)
    for position in training:
        parts[position] = Split(_sample(splits[position].inside), splits[position].outside)
    for position in held_out:
        whole = np.concatenate([splits[position].inside, splits[position].outside])
        parts[position] = Split(_sample(whole), np.arange(0))
    with_metadata = takes_metadata(network, domains, metadata_columns)
    images = EvaluationImages(domains, parts, evaluation_view(network), with_metadata=with_metadata)
    if not (images.groups % 2).any():
        raise DataError("no training domain has validation images; give data with some, or a --holdout-fraction")
    device, classes, columns = next(network.parameters()).device, domains[0].classes, list[list[Tensor]]()
    described = network
    with suppress(ArgumentError):  # several classifiers: the pixels alone tell other images
        described = network.with_features() if isinstance(network, Ensemble) else WithFeatures(network)
    for batch in watched(evaluation_loader(images, batch_size=batch_size, workers=workers)):
        pixels, target, group, *metadata = (part.to(device) for part in batch)
        answer = described(pixels, *metadata)
        row = (target, group, pixel_statistics(pixels), *(answer if isinstance(answer, tuple) else (answer,)))
        columns.append([part.cpu() for part in row])
    target, group, statistics, logits, *features = map(torch.cat, zip(*columns, strict=True))
    logits = logits.float()[:, class_positions(network, classes).argsort()]
    is_validation, is_new = group % 2 == 1, torch.isin(group // 2, torch.tensor(list(held_out), dtype=torch.long))
    is_training = ~is_validation & ~is_new
    temperature = fit_temperature(logits[is_validation], target[is_validation])
    probabilities = (logits / temperature).softmax(1)
    values = {"pixels": (statistics, target * 0), **({"features": (features[0], target)} if features else {})}
    return Calibration(
        temperature=temperature,
        network=identify(network),
        method=method,
        classes=list(classes),
        validation=_scores(probabilities[is_validation], target[is_validation]),
        held_out=_scores(probabilities[is_new], target[is_new]),
        held_out_domains=[domains[index].name for index in held_out],
        distributions={
            name: fit_distribution(part[is_training], labels[is_training], part[is_validation])
            for name, (part, labels) in values.items()
        },
    )


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """Returns the temperature T that minimizes the cross-entropy of logits / T, from 0.01 to 100.

    Logits are (N, C) and targets (N,). See Guo et al. ("On Calibration of Modern Neural Networks", ICML 2017, section
    4.2). If all images are classified right, cross-entropy falls with T down to 0, and T stays 1.
    """
    if (logits.argmax(1) == targets).all():
        return 1.0
    from scipy.optimize import minimize_scalar

    values = logits.double()
    # In the logarithm of T, as the loss is flat for a large T
    result = minimize_scalar(
        lambda log: F.cross_entropy(values / math.exp(log), targets).item(), bounds=_LOG_RANGE, method="bounded"
    )
    return math.exp(result.x)


def fit_distribution(values: Tensor, labels: Tensor, validation: Tensor) -> Distribution:
    """Fits class means and a shared covariance to values (N, D) with labels (N,), and the threshold to others (M, D).

    The covariance is shrunk as Ledoit and Wolf do (2004), since N may be below D.
    """
    from sklearn.covariance import LedoitWolf

    present, labels = labels.unique(return_inverse=True)
    means = torch.stack([values[labels == label].mean(0) for label in range(len(present))])
    shrunk = LedoitWolf(store_precision=False, assume_centered=True).fit((values - means[labels]).double().numpy())
    # Features of a collapsed network have no variance at all
    least = 1e-6 * shrunk.covariance_.diagonal().mean() + 1e-12
    precision = np.linalg.inv(shrunk.covariance_ + least * np.eye(len(shrunk.covariance_)))
    whitening = torch.from_numpy(np.linalg.cholesky(precision)).float()
    fitted = Distribution(means @ whitening, whitening, torch.tensor(math.inf))
    threshold = np.quantile(fitted.distance(validation).numpy(), TYPICAL, method="higher")
    # An image of the threshold itself, in a batch of another size, is within
    return replace(fitted, threshold=torch.tensor(threshold * 1.0001))


def _sample(positions: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(positions)[:SAMPLE]


def _scores(probabilities: Tensor, targets: Tensor) -> Scores:
    of_target = probabilities[torch.arange(len(targets)), targets]
    return Scores(of_target.sort().values, probabilities.amax(1).sort().values)
