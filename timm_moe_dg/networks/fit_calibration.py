"""Fitting the calibration of a trained network: its temperature, and the distribution of its training images."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class CalibrationData:
    """The images that a network is calibrated on, by domain."""

    domains: Sequence[Domain]
    splits: Sequence[Split]
    training: Sequence[int]  # positions of the training domains
    held_out: Sequence[int]  # positions of the domains that are new to the network
    metadata_columns: Sequence[str] | None = None

    def loader(self, network: Network, batch_size: int, workers: int) -> DataLoader:
        """Loads validation images as "out", and a sample of the training images and of held-out domains as "in".

        Raises:
            DataError: No training domain has validation images.
        """
        if not any(len(self.splits[domain].outside) for domain in self.training):
            raise DataError("no training domain has validation images; give data with some, or a --holdout-fraction")
        nothing = np.arange(0)
        splits = [Split(nothing, nothing)] * len(self.domains)
        for domain in self.training:
            splits[domain] = Split(_sample(self.splits[domain].inside), self.splits[domain].outside)
        for domain in self.held_out:
            split = self.splits[domain]
            splits[domain] = Split(_sample(np.concatenate([split.inside, split.outside])), nothing)
        metadata = takes_metadata(network, self.domains, self.metadata_columns)
        images = EvaluationImages(self.domains, splits, evaluation_view(network), with_metadata=metadata)
        return evaluation_loader(images, batch_size=batch_size, workers=workers)


@torch.inference_mode()
def calibrate(
    network: Network,
    data: CalibrationData,
    method: str,
    *,
    batch_size: int = 64,
    workers: int = 0,
    watched: Callable[[DataLoader], Any] = iter,
) -> Calibration:
    """Fits a calibration in one pass over the images of `CalibrationData.loader`, on the network's device.

    `watched` wraps the loader, to end the pass early by an exception.
    """
    device, classes = next(network.parameters()).device, data.domains[0].classes
    described, columns = _with_features(network), list[list[Tensor]]()
    for batch in watched(data.loader(network, batch_size, workers)):
        images, target, group, *metadata = (part.to(device) for part in batch)
        logits, *features = described(images, *metadata)
        row = (target, group, logits, pixel_statistics(images), *features)
        columns.append([part.float().cpu() if part.is_floating_point() else part.cpu() for part in row])
    target, group, logits, *values = map(torch.cat, zip(*columns, strict=True))
    logits = logits[:, class_positions(network, classes).argsort()]
    is_validation, is_new = group % 2 == 1, torch.isin(group // 2, torch.tensor(list(data.held_out), dtype=torch.long))
    temperature = fit_temperature(logits[is_validation], target[is_validation])
    is_training = ~is_validation & ~is_new
    distributions = {}
    for name, part in zip(("pixels", "features"), values, strict=False):
        labels = target if name == "features" else torch.zeros_like(target)
        distributions[name] = fit_distribution(part[is_training], labels[is_training], part[is_validation])
    probabilities = (logits / temperature).softmax(1)
    return Calibration(
        temperature=temperature,
        network=identify(network),
        method=method,
        classes=list(classes),
        validation=_scores(probabilities[is_validation], target[is_validation]),
        held_out=_scores(probabilities[is_new], target[is_new]),
        held_out_domains=[data.domains[index].name for index in data.held_out],
        distributions=distributions,
    )


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """Returns the temperature T that minimizes the cross-entropy of logits / T, from 0.01 to 100.

    It is that of Guo et al. ("On Calibration of Modern Neural Networks", ICML 2017, section 4.2). If all images are
    classified right, cross-entropy falls with T down to 0, and T stays 1.

    Args:
        logits: (N, C).
        targets: Class indices, (N,).
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


def _with_features(network: Network) -> Callable[..., tuple[Tensor, ...]]:
    """A function to logits and, if the network has a single classifier, its inputs."""
    with suppress(ArgumentError):  # several classifiers: the pixels alone tell other images
        network = network.with_features() if isinstance(network, Ensemble) else WithFeatures(network)
    return lambda *inputs: _as_tuple(network(*inputs))


def _scores(probabilities: Tensor, targets: Tensor) -> Scores:
    of_target = probabilities[torch.arange(len(targets)), targets]
    return Scores(of_target.sort().values, probabilities.amax(1).sort().values)


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
