"""The calibration of a trained network, a file beside its weights.

It holds a temperature, the probabilities that validation images and held-out images had, and the distribution of the
training images. It holds no single image and no single feature.
"""

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import _CACHED_NO_EXIST, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from timm.models import parse_model_name
from torch import Tensor

from ..cli.program import command
from ..cli.values import LOCAL
from ..compat import download_from_hf, hf_split
from ..errors import CheckpointError, check_regular_file
from .build import Network, data_config, hub_or_cache
from .digest import network_digest

_logger = logging.getLogger(__name__)
CALIBRATION = "calibration.safetensors"


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
    distributions: dict[str, Distribution] = field(default_factory=dict)  # "pixels", and "features" if there are any

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the file by name."""
        parts = {"validation": self.validation, "held_out": self.held_out, **self.distributions}
        return {f"{part}.{name}": value for part, table in parts.items() for name, value in vars(table).items()}

    def header(self) -> dict[str, str]:
        """Returns the text of the file's header."""
        names = ("temperature", "network", "method", "classes", "held_out_domains")
        return {"calibration": json.dumps({name: vars(self)[name] for name in names})}

    def unlike(self, images: Tensor, features: Tensor | None) -> Tensor:
        """Whether images (B, ...) are unlike those of training, bool (B,), by pixels and, if given, features (B, D)."""
        values = {"pixels": pixel_statistics(images), "features": features}
        judged = [(part, values[name]) for name, part in self.distributions.items()]
        return torch.stack([part.excludes(value) for part, value in judged if value is not None]).any(0)


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
        with hub_or_cache():
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
    """Reads a file of `finetuning.calibration.save_calibration`."""
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
