"""Metadata encoders: optional metadata to the embedding that MoGE's routers read, and which samples have one.

Axes: B samples, C columns of numbers beside the coordinates, R embedding features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...errors import MetadataError
from ..compat import values_readable
from ..parameters import OwnParameters, UpcastLinear, without_autocast
from .coverage import Coverage
from .location import CoordinateEncoder


@register_notrace_module
class MetadataEncoder(nn.Module):
    """Encodes the metadata of a batch and marks the samples that have none.

    Args:
        encoder: Maps metadata to (B, R). Two methods are optional: `present(metadata) -> (B,) bool` tells the samples
            with metadata (default: those without NaN), and `check(metadata)` raises an error on invalid metadata.
        out_features: R; None reads `encoder.out_features`.
    """

    def __init__(self, encoder: nn.Module, out_features: int | None = None) -> None:
        super().__init__()
        out_features = out_features or getattr(encoder, "out_features", None)
        if out_features is None:
            raise MetadataError.of("metadata_features", None, "give the encoder's width or an attribute out_features")
        self.encoder: Any = encoder  # Any: mypy knows no optional methods
        self.out_features = out_features
        self.coverage: Coverage | None = None  # outside of it, samples are treated as without metadata, in evaluation

    def forward(self, x: Tensor, metadata: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Encodes metadata (B, ...) of images (B, ...): the embedding (B, R), and (B,) bool, True where it exists.

        Metadata are None when no sample has any. The embedding of samples without metadata is arbitrary.
        """
        if metadata is None:
            embedding = torch.zeros(x.shape[0], self.out_features, device=x.device, dtype=x.dtype)
            if self.training:
                # Distributed training requires a gradient, even if zero, for every parameter
                embedding = embedding + sum(parameter.sum() for parameter in self.encoder.parameters()) * 0.0
            return embedding, torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        self._check(x, metadata)
        with without_autocast(x.device.type):  # sines of angles in bfloat16 are noise
            present = self.encoder.present(metadata) if hasattr(self.encoder, "present") else _without_nan(metadata)
            filled = metadata.masked_fill(~present.view([-1] + [1] * (metadata.dim() - 1)), 0)
            embedding = self.encoder(filled)
            if self.coverage is not None and not self.training:
                present = present & self.coverage(filled)
        return embedding, present

    def _check(self, x: Tensor, metadata: Tensor) -> None:
        if not isinstance(metadata, Tensor):
            raise MetadataError.of("metadata", type(metadata).__name__, "give a tensor with one row per image")
        if isinstance(self.encoder, CoordinateEncoder | ColumnsEncoder) and metadata.dtype.itemsize < 4:
            # bfloat16 moves a place by up to half a degree
            remedy = (
                "coordinates need float32 or float64; with FSDP2, give MixedPrecisionPolicy(cast_forward_inputs=False) "
                "and cast the images"
            )
            raise MetadataError.of("metadata dtype", metadata.dtype, remedy)
        if not values_readable(metadata):
            return
        if metadata.ndim == 0 or metadata.shape[0] != x.shape[0]:
            raise MetadataError.of("metadata shape", tuple(metadata.shape), f"give one row per image, {x.shape[0]}")
        if hasattr(self.encoder, "check"):
            self.encoder.check(metadata)


def _without_nan(metadata: Tensor) -> Tensor:
    """(B, ...) -> (B,) bool, True for samples without NaN."""
    return ~metadata.isnan().flatten(1).any(dim=1) if metadata.dim() > 1 else ~metadata.isnan()


COLUMN_FEATURES = 64  # width of each column's embedding; MoGE's paper has coordinates alone


class NumberEncoder(OwnParameters):
    """Embeds a standardized number by a small network 1 -> R -> R; zeros for an unknown number.

    `mean` and the positive `std` usually come from the training images.
    """

    def __init__(
        self,
        mean: float,
        std: float,
        *,
        out_features: int = COLUMN_FEATURES,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not std > 0:
            raise MetadataError.of("std", std, "give a positive one, or 1 for numbers that are all the same")
        self.mean, self.std = float(mean), float(std)
        self.hidden = UpcastLinear(1, out_features, device=device, dtype=dtype)
        self.last = UpcastLinear(out_features, out_features, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """The default of torch for linear layers."""
        # Its random biases spread the hidden units over the range of numbers
        self.hidden.reset_parameters()
        self.last.reset_parameters()

    def forward(self, numbers: Tensor) -> Tensor:
        """(B,) numbers, NaN for unknown -> (B, R)."""
        unknown = numbers.isnan()
        standard = ((numbers - self.mean) / self.std).masked_fill(unknown, 0.0)
        return self.last(F.gelu(self.hidden(standard.unsqueeze(1)))) * (~unknown).unsqueeze(1)


class ColumnsEncoder(nn.Module):
    """Encodes coordinates and further numbers, such as a time, and concatenates the embeddings.

    A sample has metadata if its coordinates or any of its numbers are known. The embeddings of unknown ones are zeros.
    `location` encodes longitude and latitude. `columns` maps names of numbers to their means and standard deviations.
    """

    def __init__(
        self,
        location: nn.Module,
        columns: Mapping[str, Sequence[float]],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(location, CoordinateEncoder):
            remedy = "columns need an encoder of coordinates, such as spherical_harmonics"
            raise MetadataError.of("metadata_columns", list(columns), remedy)
        if not all(name.isprintable() for name in columns):
            raise MetadataError.of("metadata_columns", list(columns), "a name has control characters; rename it")
        self.location = location
        self.columns = tuple(columns)
        self.numbers = nn.ModuleList(
            NumberEncoder(mean, std, device=device, dtype=dtype) for mean, std in columns.values()
        )
        self.out_features = location.out_features + COLUMN_FEATURES * len(self.columns)

    def present(self, metadata: Tensor) -> Tensor:
        """(B, 2 + C) -> (B,) bool, True where the coordinates or any number are known (not NaN)."""
        return self.location.present(metadata[:, :2]) | ~metadata[:, 2:].isnan().all(dim=1)

    def check(self, metadata: Tensor) -> None:
        """Checks the number of columns, and the coordinates by their encoder."""
        if metadata.ndim != 2 or metadata.shape[1] != 2 + len(self.columns):
            remedy = f"give (batch, {2 + len(self.columns)}): longitude, latitude, {', '.join(self.columns)}"
            raise MetadataError.of("metadata shape", tuple(metadata.shape), remedy)
        self.location.check(metadata[:, :2])

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2 + C) longitude, latitude in degrees and the columns, NaN for unknown -> (B, R)."""
        located = self.location.present(metadata[:, :2]).unsqueeze(1)
        parts = [self.location(metadata[:, :2].masked_fill(~located, 0.0)) * located]
        for index, number in enumerate(self.numbers):
            parts.append(number(metadata[:, 2 + index]))
        return torch.cat(parts, dim=1)
