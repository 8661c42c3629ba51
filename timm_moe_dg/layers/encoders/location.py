"""Encoders of locations: geographic coordinates or location ids to the embedding that MoGE's routers read.

Axes: B samples, R embedding features, L degrees of the harmonics (l = 0 .. L-1, so L * L features).
"""

import math
import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from ...errors import MetadataError
from ..parameters import OwnParameters, UpcastLinear


def spherical_harmonics(lonlat: Tensor, degrees: int, norm: str = "orthonormal") -> Tensor:
    """Real spherical harmonics of (B, 2) longitude and latitude in degrees -> (B, L * L) float64, L = `degrees`.

    With theta = radians(latitude + 90) and phi = radians(longitude + 180), the feature (l, m) is
    P_l^|m|(cos theta) times sqrt(2) cos(m phi) for m > 0, sqrt(2) sin(|m| phi) for m < 0 and 1 for m = 0, where P is
    the fully normalized associated Legendre function without the Condon-Shortley phase (a factor (-1)^m). The order is
    l = 0 .. L-1, then m = -l .. l. The `norm` is 'orthonormal', or 'satclip', which multiplies all m = 0 terms by pi,
    as the released SatCLIP weights (Klemmer et al., 2025) expect.
    """
    phi = torch.deg2rad(lonlat[:, :1].double() + 180.0)
    theta = torch.deg2rad(lonlat[:, 1:].double() + 90.0)
    m = torch.arange(degrees, dtype=torch.float64, device=lonlat.device)
    # P_m^m = sin^m theta * sqrt((2m+1)!! / (2m)!! / 4 pi), as a running product in logarithms
    log_ratios = 0.5 * torch.log((2.0 * m + 1.0) / (2.0 * m).clamp(min=1.0))
    diagonal = torch.sin(theta).pow(m) * torch.exp(torch.cumsum(log_ratios, 0)) / math.sqrt(4.0 * math.pi)
    waves_cos, waves_sin = torch.cos(m * phi) * math.sqrt(2.0), torch.sin(m * phi) * math.sqrt(2.0)
    zonal = math.pi if norm == "satclip" else 1.0
    last, before = torch.zeros_like(diagonal), torch.zeros_like(diagonal)
    features: list[Tensor] = []
    # The three-term recurrence over l at fixed m, which is stable at every order
    for degree in range(degrees):
        # Columns m = 0 .. L-1. Column m starts with the diagonal, at l = m.
        outer = torch.sqrt(abs(4.0 * degree**2 - 1.0) / (degree**2 - m**2).clamp(min=1.0)) * (m < degree)
        inner = torch.sqrt(((degree - 1.0) ** 2 - m**2).clamp(min=0.0) / abs(4.0 * (degree - 1.0) ** 2 - 1.0))
        legendre = outer * (torch.cos(theta) * last - inner * before) + (m == degree) * diagonal
        before, last = last, legendre
        negative = (legendre * waves_sin)[:, 1 : degree + 1].flip(-1)
        features += [negative, legendre[:, :1] * zonal, (legendre * waves_cos)[:, 1 : degree + 1]]
    return torch.cat(features, dim=-1)


class CoordinateEncoder(OwnParameters):
    """Base of coordinate encoders: validation and missing values."""

    out_features: int

    def present(self, metadata: Tensor) -> Tensor:
        """(B, 2) -> (B,) bool, True where both coordinates are known (not NaN)."""
        return ~metadata.isnan().any(dim=-1)

    def check(self, metadata: Tensor) -> None:
        """Checks that metadata are longitude and latitude in degrees, and warns if they look like radians.

        Values are checked on the CPU alone.
        """
        if metadata.ndim != 2 or metadata.shape[1] != 2:
            raise MetadataError.of("metadata shape", tuple(metadata.shape), "give (batch, 2): longitude, latitude")
        if not metadata.is_floating_point():
            raise MetadataError.of("metadata dtype", metadata.dtype, "give floats: longitude, latitude in degrees")
        if metadata.device.type != "cpu":  # reading values would wait for the device; those who read files check too
            return
        largest = metadata.detach().nan_to_num(nan=0.0).abs().amax(dim=0) if len(metadata) else metadata.new_zeros(2)
        longitude, latitude = largest.tolist()
        if latitude > 90:
            hint = "; are longitude and latitude swapped?" if longitude <= 90 else ""
            raise MetadataError.of("latitude", latitude, f"metadata[:, 1] lies in -90..90 degrees{hint}")
        if longitude > 180:
            hint = "; subtract 360 from values beyond 180" if longitude <= 360 else ""
            raise MetadataError.of("longitude", longitude, f"metadata[:, 0] lies in -180..180 degrees{hint}")
        # As degrees, all of them would be in one small part of the Gulf of Guinea
        if len(metadata) >= 16 and 0 < longitude <= math.pi and latitude <= math.pi / 2:
            hint = "all coordinates lie within pi of zero: are they radians? Give longitude and latitude in degrees"
            warnings.warn(hint, stacklevel=2)


class LocationEncoder(CoordinateEncoder):
    """Spherical harmonics followed by a SIREN: coordinates to an embedding (MoGE, section 2.3; SatCLIP).

    The network is L*L -> hidden -> hidden -> R with sine activations (frequency 30 in the first layer, then 1), dropout
    at the rate `drop` before each sine in training (0.5 in SatCLIP's code), and a linear last layer. It is randomly
    initialized. `degrees` is L and `out_features` R. The `norm` of the harmonics is 'orthonormal' or 'satclip', and
    their type always float64.
    """

    def __init__(
        self,
        out_features: int = 256,
        hidden_features: int = 256,
        *,
        degrees: int = 10,
        norm: str = "orthonormal",
        drop: float = 0.5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.degrees = degrees
        self.norm = norm
        # In float32 at least: the first sine multiplies a rounding error by 30
        self.first = UpcastLinear(degrees**2, hidden_features, device=device, dtype=dtype)
        self.hidden = UpcastLinear(hidden_features, hidden_features, device=device, dtype=dtype)
        self.last = UpcastLinear(hidden_features, out_features, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.first_frequency = 30.0
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """SIREN's uniform initialization within 1 / d_in in the first layer, sqrt(6 / d_in) in others; biases too."""
        for layer in (self.first, self.hidden, self.last):
            bound = 1 / layer.in_features if layer is self.first else math.sqrt(6 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.uniform_(layer.bias, -bound, bound)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees, without NaN -> (B, R)."""
        x = spherical_harmonics(metadata, self.degrees, self.norm)
        x = torch.sin(self.first_frequency * self.drop(self.first(x)))
        x = torch.sin(self.drop(self.hidden(x)))
        return self.last(x)


class SinCosEncoder(CoordinateEncoder):
    """Sine and cosine of longitude and latitude, continuous across the date line, then a network 4 -> hidden -> R."""

    def __init__(
        self,
        out_features: int = 256,
        hidden_features: int = 256,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.hidden = UpcastLinear(4, hidden_features, device=device, dtype=dtype)
        self.last = UpcastLinear(hidden_features, out_features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform: by He et al. (2015) for the hidden layer, within 1 / sqrt(d_in) for the last; zero biases."""
        nn.init.kaiming_uniform_(self.hidden.weight, nonlinearity="relu")
        nn.init.kaiming_uniform_(self.last.weight, a=math.sqrt(5))
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.last.bias)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2) longitude, latitude in degrees, without NaN -> (B, R)."""
        angles = torch.deg2rad(metadata.double())
        x = torch.cat([angles.sin(), angles.cos()], dim=1)
        x = F.gelu(self.hidden(x))
        return self.last(x)


class LocationIdEmbedding(OwnParameters):
    """A learned embedding for each discrete location, such as a camera trap (MoGE, section 2.3, iWildCam).

    Ids run from 0 to `num_locations` - 1, and negative ids are unknown. `out_features` is R. `seen_locations` are those
    of the training images.
    """

    seen: Tensor | None

    def __init__(
        self,
        num_locations: int,
        out_features: int = 256,
        *,
        seen_locations: Iterable[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_locations < 1:
            raise MetadataError.of("num_locations", num_locations, "give the number of locations")
        self.num_locations = num_locations
        self.out_features = out_features
        self.table = nn.Embedding(num_locations, out_features, device=device, dtype=dtype)
        self.register_buffer("seen", None, persistent=False)  # the configuration has it, and older weights lack it
        if seen_locations is not None:
            self.set_seen(seen_locations)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, standard deviation 0.02."""
        trunc_normal_(self.table.weight, std=0.02)

    def set_seen(self, locations: Iterable[int]) -> None:
        """Sets the locations of the training images. In evaluation, all others are unknown. Negative ids are none."""
        self.seen_locations = tuple(sorted({int(location) for location in locations if location >= 0}))
        known = torch.tensor(self.seen_locations, dtype=torch.long)
        self.check(known)
        seen = torch.zeros(self.num_locations, dtype=torch.bool).index_fill(0, known, True)
        self.seen = seen.to(self.table.weight.device)

    def present(self, metadata: Tensor) -> Tensor:
        """(B,) -> (B,) bool, True where the location is known: not negative and, in evaluation, seen in training."""
        known = metadata >= 0
        if self.seen is None or self.training:
            return known
        return known & self.seen[metadata.clamp(min=0)]

    def check(self, metadata: Tensor) -> None:
        """Checks that metadata are integers (B,) below `num_locations`."""
        if metadata.ndim != 1:
            raise MetadataError.of("metadata shape", tuple(metadata.shape), "give (batch,): one location id per image")
        if metadata.is_floating_point() or metadata.dtype == torch.bool:
            raise MetadataError.of("metadata dtype", metadata.dtype, "give int64 location ids")
        if metadata.device.type != "cpu":  # the embedding's own check needs no wait
            return
        largest = int(metadata.max()) if len(metadata) else 0
        if largest >= self.num_locations:
            remedy = f"ids are 0 to {self.num_locations - 1}, or -1 for an unknown location; or raise num_locations"
            raise MetadataError.of("location id", largest, remedy)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B,) int64 known ids -> (B, R)."""
        return self.table(metadata)


LOCATION_ENCODERS = ("spherical_harmonics", "sincos", "location_id")
