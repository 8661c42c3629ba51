"""The calibration of a trained network: fitting, the file beside its weights, and thresholds of its probabilities.

The file holds a temperature, the probabilities of validation images and held-out images, and the distribution of the
training images. It holds no single image and no single feature.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import parse_model_name
from torch import Tensor
from torch.utils.data import DataLoader

from ..cli.tool import command
from ..cli.values import LOCAL
from ..data import Domain, EvaluationImages, Split, evaluation_loader
from ..errors import ArgumentError, CheckpointError, DataError, check_regular_file
from ..layers.compat import download_from_hf, hf_split
from ..layers.geo_moe_mlp import answers_without_metadata
from .averages import evaluation_view
from .build import Network, data_config
from .trained import WithFeatures, class_positions, network_digest, takes_metadata, uses_metadata

_logger = logging.getLogger(__name__)
CALIBRATION = "calibration.safetensors"
SHARED = "shared_features"  # classifier's inputs of images that are answered without metadata
SAMPLE = 1000  # images that represent the training images of a domain, or a domain that was held out
TYPICAL = 0.995  # share of validation images within each of two distributions: at least 99% are within both
_LOG_RANGE = (math.log(0.01), math.log(100.0))  # of temperatures


@dataclass(frozen=True)
class Scores:
    """Calibrated probabilities of N labeled images, float32 (N,), each sorted in ascending order."""

    of_target: Tensor  # probability of the right class
    confidence: Tensor  # probability of the predicted class


@dataclass(frozen=True)
class Distribution:
    """Class means with a shared covariance, and the Mahalanobis distance up to which an image is like the others.

    The score is that of Lee et al. ("A Simple Unified Framework for Detecting Out-of-Distribution Samples", NeurIPS
    2018, equation 2), of one layer.
    """

    means: Tensor  # (K, D), multiplied by `whitening`
    whitening: Tensor  # (D, D), a root of the precision matrix
    threshold: Tensor  # ()

    def distance(self, values: Tensor) -> Tensor:
        """(B, D) -> (B,) distance to the nearest mean."""
        whitening, means = self.whitening.to(values.device), self.means.to(values.device)
        return torch.cdist(values.float() @ whitening, means).amin(1)

    def excludes(self, values: Tensor) -> Tensor:
        """(B, D) -> (B,) bool: farther than the threshold."""
        return self.distance(values) > self.threshold.item()


@dataclass(frozen=True)
class Calibration:
    """See the module."""

    temperature: float
    network: str  # identifies weights and settings, see `identify`
    method: str  # architecture and training method; the same for all runs of a row of a sweep
    classes: list[str]
    validation: Scores  # on validation images of the training domains
    held_out: Scores  # on domains that the network was not trained on
    held_out_domains: list[str]
    # "pixels", "features" if there are any, and "shared_features" if the network reads metadata
    distributions: dict[str, Distribution] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the file by name."""
        parts = {"validation": self.validation, "held_out": self.held_out, **self.distributions}
        return {f"{part}.{name}": value for part, table in parts.items() for name, value in vars(table).items()}

    def header(self) -> dict[str, str]:
        """Returns the text of the file's header."""
        names = ("temperature", "network", "method", "classes", "held_out_domains")
        return {"calibration": json.dumps({name: vars(self)[name] for name in names})}

    def unlike(self, images: Tensor, features: Tensor | None, is_routed: Tensor | None = None) -> Tensor:
        """Whether images (B, ...) are unlike those of training, bool (B,), by pixels and, if given, features (B, D).

        `is_routed` is False where the network answered without metadata, and None stands for True everywhere.
        """
        is_unlike = self.distributions["pixels"].excludes(pixel_statistics(images))
        judged = torch.ones_like(is_unlike) if is_routed is None or SHARED not in self.distributions else is_routed
        for name, mask in {"features": judged, SHARED: ~judged}.items():
            if features is not None and name in self.distributions:
                is_unlike |= mask & self.distributions[name].excludes(features)
        return is_unlike


def pixel_statistics(images: Tensor) -> Tensor:
    """(B, C, H, W) images -> (B, 2C) mean and log standard deviation by channel; rows of any values are one channel."""
    values = images.float().flatten(2) if images.ndim > 2 else images.float().unsqueeze(1)
    # A constant image has no logarithm
    return torch.cat([values.mean(2), (values.std(2) + 1e-3).log()], dim=1)


def load_calibration(model: str) -> Calibration | None:
    """Reads the calibration of a `local-dir:` or `hf-hub:` model; None if it has none.

    Raises:
        CheckpointError: The file is damaged.
    """
    source, location = parse_model_name(model)
    if source == "local-dir":
        path = Path(location, CALIBRATION)
        return read_calibration(path) if path.exists() else None
    if source != "hf-hub":
        return None
    try:
        return read_calibration(Path(download_from_hf(location, CALIBRATION)))
    except LocalEntryNotFoundError:  # a subclass of the next, for a cache that timm's own loading may have filled
        repository, revision = hf_split(location)
        if try_to_load_from_cache(repository, CALIBRATION, revision=revision) is not _CACHED_NO_EXIST:
            remedy = "load the model once with the Hub in reach, or its probabilities may lack their temperature"
            _logger.warning(f"model={model!r}: {CALIBRATION} is not in the Hub's cache; {remedy}")
        return None
    except EntryNotFoundError:
        return None


def find_calibration(model: str, network: Network) -> Calibration | None:
    """Reads the calibration of a model as it was loaded; None if it has none, or one of other weights or settings."""
    calibration = load_calibration(model)
    if calibration is not None and calibration.network != identify(network):
        _logger.warning(f"{model}: its calibration is of other weights or settings, and is left out")
        return None
    return calibration


def identify(network: Network) -> str:
    """Returns a text that changes with anything that changes a network's logits."""
    sizes = [data_config(member)["input_size"] for member in getattr(network, "networks", [network])]
    return f"{network_digest(network)[:16]} {sizes}"


def calibration_command(model: str) -> str:
    """Returns the command that calibrates a model."""
    return f"{command('evaluate')} --model {model.removeprefix(LOCAL).removesuffix('/best')} --calibrate"


def read_calibration(path: Path) -> Calibration:
    """Reads a file of `storage.run_folder.save_calibration`."""
    try:
        check_regular_file(path)
        with safe_open(path, "pt") as file:
            values = json.loads((file.metadata() or {})["calibration"])
            parts: dict[str, dict[str, Tensor]] = {}
            for key in file.keys():  # noqa: SIM118 (the file is no mapping)
                part, _, name = key.partition(".")
                parts.setdefault(part, {})[name] = file.get_tensor(key)
        values |= {name: Scores(**parts.pop(name)) for name in ("validation", "held_out")}
        calibration = Calibration(**values, distributions={name: Distribution(**part) for name, part in parts.items()})
        if not 0 < calibration.temperature < math.inf:
            raise ValueError(f"temperature={calibration.temperature}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        remedy = f"remove it, or write it again: {calibration_command('RUN')}"
        raise CheckpointError(f"{str(path)!r}: cannot be read as a calibration ({error}); {remedy}") from error
    return calibration


def set_threshold(of_target: Tensor, coverage: float) -> float:
    """Returns the least probability of a class in a prediction set of split conformal prediction.

    The score 1 - p(class) gives the smallest sets on average (Sadinle, Lei and Wasserman, "Least Ambiguous Set-Valued
    Classifiers with Bounded Error Levels", JASA 2019). With N exchangeable images, a set holds the right class with at
    least this probability: the threshold is that of rank ceil((N + 1) coverage) among their probabilities of the right
    class, `of_target` (N,), which ascend.

    >>> set_threshold(torch.tensor([0.25, 0.5, 0.75]), 0.5)
    0.5
    """
    count = len(of_target)
    rank = math.ceil((count + 1) * coverage - 1e-9)
    if rank > count:
        needed, most = math.ceil(coverage / (1 - coverage) - 1e-9), math.floor(1000 * count / (count + 1)) / 1000
        remedy = f"needs {needed} images to calibrate on, and there are {count}; "
        remedy += f"give at most {most:g}, or calibrate on more" if most else "calibrate on more"
        raise ArgumentError.of("coverage", coverage, remedy)
    return of_target[count - rank].item()


def abstention_threshold(confidence: Tensor, abstain: float) -> float:
    """Returns the confidence below which this share of (N,) images lies, whose confidences ascend.

    Of equal confidences, such as those that round to 1, all or none lie below. A warning says so.
    """
    rank = math.floor(len(confidence) * abstain + 1e-9)
    threshold = confidence[rank].item() if rank < len(confidence) else math.inf
    below = int((confidence < threshold).sum())
    if rank - below > 0.01 * len(confidence):
        reason = f"because further ones share the confidence {threshold:g}"
        _logger.warning(f"abstain={abstain:g}: {below / len(confidence):.1%} of answers go to a person, {reason}")
    return threshold


def held_out_scores(folder: Path, own: Calibration) -> Scores:
    """Collects the scores on held-out domains of the runs below a folder that share method and classes."""
    places = sorted(path for path in folder.glob("**/best") if path.is_dir())
    calibrations = [read_calibration(path / CALIBRATION) for path in places if (path / CALIBRATION).is_file()]
    if not any(len(item.held_out.confidence) for item in calibrations):
        remedy = f"holds no calibrated run that held out a domain; calibrate each run: {calibration_command('RUN')}"
        raise ArgumentError.of("calibration", str(folder), remedy)
    fitting = [
        item for item in calibrations if (item.method, sorted(item.classes)) == (own.method, sorted(own.classes))
    ]
    if not fitting:
        remedy = f"the model is of {own.method} with {len(own.classes)} classes, and no run is; give the model's sweep"
        raise ArgumentError.of("calibration", str(folder), remedy)
    if len(places) > len(calibrations):
        _logger.warning(f"{folder}: {len(places) - len(calibrations)} of {len(places)} runs are not calibrated")
    parts = [vars(item.held_out) for item in fitting]
    return Scores(*(torch.cat([part[name] for part in parts]).sort().values for name in parts[0]))


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
        described = WithFeatures(network)
    has_paths = hasattr(network, "metadata_encoder") and getattr(network, "expert_mode", "routed") == "routed"
    has_paths &= described is not network and answers_without_metadata(network)
    for batch in watched(evaluation_loader(images, batch_size=batch_size, workers=workers)):
        pixels, target, group, *metadata = (part.to(device) for part in batch)
        answer = described(pixels, *metadata)
        row = (target, group, pixel_statistics(pixels), *(answer if isinstance(answer, tuple) else (answer,)))
        if has_paths:
            row = (*row, uses_metadata(network, pixels, *metadata), described(pixels)[1])
        columns.append([part.cpu() for part in row])
    target, group, statistics, logits, *features = map(torch.cat, zip(*columns, strict=True))
    logits = logits.float()[:, class_positions(network, classes).argsort()]
    is_validation, is_new = group % 2 == 1, torch.isin(group // 2, torch.tensor(list(held_out), dtype=torch.long))
    is_training = ~is_validation & ~is_new
    temperature = fit_temperature(logits[is_validation], target[is_validation])
    probabilities = (logits / temperature).softmax(1)
    everywhere = torch.ones_like(is_training)
    values = {"pixels": (statistics, target * 0, everywhere)}
    if features:
        values["features"] = (features[0], target, features[1] if has_paths else everywhere)
    if has_paths:
        values[SHARED] = (features[2], target, everywhere)
    return Calibration(
        temperature=temperature,
        network=identify(network),
        method=method,
        classes=list(classes),
        validation=_scores(probabilities[is_validation], target[is_validation]),
        held_out=_scores(probabilities[is_new], target[is_new]),
        held_out_domains=[domains[index].name for index in held_out],
        distributions={
            name: fit_distribution(part[is_training & mask], labels[is_training & mask], part[is_validation & mask])
            for name, (part, labels, mask) in values.items()
            if (is_training & mask).any() and (is_validation & mask).any()
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
