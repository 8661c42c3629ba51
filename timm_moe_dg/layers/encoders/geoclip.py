"""GeoCLIP's pretrained location encoder (Vivanco Cepeda et al., NeurIPS 2023, arXiv:2309.16020).

The PyPI package geoclip brings the weights. Its import would load transformers and an image tower, so its file alone is
read, and the network is built here. Axes: B places, F = 256 frequencies, R = 512 embedding features.
"""

import importlib.util
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, MissingDependencyError
from ..precision import UpcastLinear
from .location import CoordinateEncoder

_FILE = "model/weights/location_encoder_weights.pth"
_RENAMED = {"LocEnc": "scales.", ".capsule.": ".", ".head.0.": ".7.", ".0.b": ".0.frequencies"}


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
    path = Path(*(spec.submodule_search_locations or ()), _FILE) if spec else None
    if path is None or not path.is_file():
        encoder.to_empty(device="cpu")
        for value in encoder.state_dict().values():
            value.fill_(math.nan)
        return encoder
    try:
        released = torch.load(path, map_location="cpu", weights_only=True)
        for old, new in _RENAMED.items():
            released = {key.replace(old, new): value for key, value in released.items()}
        encoder.load_state_dict(released, assign=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{str(path)!r}: is not GeoCLIP's ({reason}); reinstall the package geoclip") from error
    return encoder


def check_weights(network: nn.Module) -> None:
    """Raises a `MissingDependencyError` if an encoder has no weights yet."""
    for module in network.modules():
        first = module.scales[0][0].frequencies if isinstance(module, GeoClipEncoder) else None
        if first is not None and not first.is_meta and first.isnan().any():
            raise MissingDependencyError.of("metadata_encoder='geoclip'", "geoclip", "geoclip")
