"""Pretrained location encoders: SatCLIP (Klemmer et al., 2025) and GeoCLIP (Vivanco Cepeda et al., 2023).

SatCLIP is MoGE's plug-in encoder (section 2.2, ii). The released files are training checkpoints with
`hyper_parameters`, and with a `state_dict` that contains an image tower and, in float64, the location network.
Embeddings of L40 encoders at high latitudes differ from those of SatCLIP's own program. Its harmonics, closed forms in
float64, lose precision toward the poles at L = 40. Against stable recurrences they are off by 4e-5 below 45 degrees of
latitude, by 1e-2 below 60, and by up to 0.6 beyond. The harmonics here are accurate everywhere.

The PyPI package geoclip brings GeoCLIP's weights (arXiv:2309.16020). Its import would load transformers and an image
tower, so its file alone is read, and the network is built here.

Axes: B places, F = 256 frequencies, R embedding features, 512 of GeoCLIP.
"""

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import Tensor, nn

from ...errors import CheckpointError, MissingDependencyError
from ..parameters import UpcastLinear
from .location import CoordinateEncoder, LocationEncoder

_PREFIX = "model.location.nnet."
_LAYERS = {"layers.0": "first", "layers.1": "hidden", "last_layer": "last"}
_SIZES = {"legendre_polys": "degrees", "capacity": "hidden_features", "embed_dim": "out_features"}
_KINDS = {
    "le_type": "sphericalharmonics",
    "pe_type": "siren",
    "harmonics_calculation": "analytic",
    "num_hidden_layers": 2,
}


class SatClipEncoder(LocationEncoder):
    """A `LocationEncoder` with SatCLIP's harmonics, frozen, and always in evaluation mode, that is without dropout."""

    def __init__(self, degrees: int, hidden_features: int, out_features: int) -> None:
        super().__init__(out_features, hidden_features, degrees=degrees, norm="satclip")
        self.requires_grad_(False)
        self.eval()

    def reset_parameters(self) -> None:
        """Does nothing: the weights come from a checkpoint."""

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode."""
        return super().train(False)


def load_satclip(source: str | os.PathLike[str]) -> SatClipEncoder:
    """Loads a pretrained encoder in float32 from a released `.ckpt` or a Hub repository.

    A repository such as 'microsoft/SatCLIP-ViT16-L10' holds a file of the same name in lower case. Anything but a
    SatCLIP checkpoint is a `CheckpointError`, and other pickles are refused without being executed.
    """
    path = Path(source) if Path(source).is_file() else _download(str(source))
    with _refused(path, "SatCLIP's", "give the file as it was released"):
        # weights_only: the file is a pickle, of which torch reads tensors and plain containers alone
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        settings, stored = checkpoint["hyper_parameters"], checkpoint["state_dict"]
        if others := {name: settings[name] for name in _KINDS if settings.get(name, _KINDS[name]) != _KINDS[name]}:
            raise ValueError(f"{others}, where only {_KINDS} is supported")
        encoder = SatClipEncoder(**{name: settings[released_name] for released_name, name in _SIZES.items()})
        names = {f"{name}.{kind}": f"{layer}.{kind}" for layer, name in _LAYERS.items() for kind in ("weight", "bias")}
        encoder.load_state_dict({name: stored[f"{_PREFIX}{released_name}"] for name, released_name in names.items()})
    return encoder


def _download(name: str) -> Path:
    remedy = "give a file, or a repository such as microsoft/SatCLIP-ViT16-L10"
    if name.count("/") != 1 or Path(name).suffix == ".ckpt":
        raise CheckpointError(f"source={name!r}: there is no such file; {remedy}")
    try:
        return Path(hf_hub_download(name, f"{name.split('/')[1].lower()}.ckpt"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"source={name!r}: is not on the Hub ({error}); {remedy}") from error


@contextmanager
def _refused(path: Path, owner: str, remedy: str) -> Iterator[None]:
    """Context in which errors of reading weights become a `CheckpointError`."""
    try:
        yield
    except Exception as error:  # those of damaged and foreign files have no common class
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"source={str(path)!r}: is not {owner} ({reason:.300}); {remedy}") from error


_GEOCLIP_FILE = "model/weights/location_encoder_weights.pth"
_GEOCLIP_NAMES = {"LocEnc": "scales.", ".capsule.": ".", ".head.0.": ".7.", ".0.b": ".0.frequencies"}


def equal_earth(lonlat: Tensor) -> Tensor:
    """(B, 2) longitude, latitude in degrees -> (B, 2) by the Equal Earth projection (Savric et al., 2018)."""
    longitude, latitude = torch.deg2rad(lonlat).unbind(1)
    theta = torch.asin(math.sqrt(0.75) * torch.sin(latitude))
    a1, a2, a3, a4 = 1.340264, -0.081106, 0.000893, 0.003796
    slope = 9.0 * a4 * theta**8 + 7.0 * a3 * theta**6 + 3.0 * a2 * theta**2 + a1
    x = 2.0 * math.sqrt(3.0) * longitude * torch.cos(theta) / (3.0 * slope)
    return torch.stack((x, a4 * theta**9 + a3 * theta**7 + a2 * theta**3 + a1 * theta), dim=1)


class FourierFeatures(nn.Module):
    """Cosines and sines at fixed frequencies: (B, 2) -> (B, 2 F)."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(256, 2))

    def forward(self, points: Tensor) -> Tensor:
        """(B, 2) points of the plane -> (B, 2 F)."""
        phases = 2.0 * math.pi * points @ self.frequencies.to(points.dtype).T
        return torch.cat((phases.cos(), phases.sin()), dim=1)


class GeoClipEncoder(CoordinateEncoder):
    """Sum of three networks that read Fourier features at different scales; without weights, see `load_geoclip`.

    The projection has an edge: embeddings differ on the two sides of the date line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out_features = 512
        self.scales: Any = nn.ModuleList(
            nn.Sequential(
                FourierFeatures(),
                *(UpcastLinear(512, 1024), nn.ReLU(), UpcastLinear(1024, 1024), nn.ReLU()),
                *(UpcastLinear(1024, 1024), nn.ReLU(), UpcastLinear(1024, self.out_features)),
            )
            for _ in range(3)
        )

    def reset_parameters(self) -> None:
        """Does nothing: the weights are published ones."""

    def check(self, metadata: Tensor) -> None:
        """Checks the coordinates as all coordinate encoders do, and that there are weights."""
        super().check(metadata)
        if metadata.device.type == "cpu":
            check_weights(self)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees, without NaN -> (B, R)."""
        dtype = torch.promote_types(self.scales[0][0].frequencies.dtype, torch.float32)
        points = equal_earth(metadata.to(dtype)) * 66.50336 / 180.0  # GeoCLIP's units
        embedding = torch.zeros(points.shape[0], self.out_features, dtype=dtype, device=points.device)
        for scale in self.scales:
            embedding = embedding + scale(points)
        return embedding


def load_geoclip() -> GeoClipEncoder:
    """Loads the encoder with the weights of the package geoclip, in float32.

    Without the package, all weights are NaN until a checkpoint with others is loaded, see `check_weights`.
    """
    with torch.device("meta"):
        encoder = GeoClipEncoder()
    spec = importlib.util.find_spec("geoclip")  # without importing it
    path = Path(*(spec.submodule_search_locations or ()), _GEOCLIP_FILE) if spec else None
    if path is None or not path.is_file():
        encoder.to_empty(device="cpu")
        for value in encoder.state_dict().values():
            value.fill_(math.nan)
        return encoder
    with _refused(path, "GeoCLIP's", "reinstall the package geoclip"):
        released = torch.load(path, map_location="cpu", weights_only=True)
        for old, new in _GEOCLIP_NAMES.items():
            released = {key.replace(old, new): value for key, value in released.items()}
        encoder.load_state_dict(released, assign=True)
    return encoder


def check_weights(network: nn.Module) -> None:
    """Raises a `MissingDependencyError` if an encoder has no weights yet."""
    for module in network.modules():
        first = module.scales[0][0].frequencies if isinstance(module, GeoClipEncoder) else None
        if first is not None and not first.is_meta and first.isnan().any():
            raise MissingDependencyError.of("metadata_encoder='geoclip'", "geoclip", "geoclip")
