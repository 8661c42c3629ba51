"""From optional metadata to what the routers of a MoGE model read: an embedding, and who has one.

Axes: B samples, R embedding features.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Optional

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch import Tensor, nn

from ...errors import MetadataError
from ..own_parameters import OwnParameters
from ..precision import UpcastLinear, values_readable, without_autocast
from .coverage import Coverage
from .location import CoordinateEncoder


@register_notrace_module
class MetadataEncoder(nn.Module):
    """Runs an encoder on the samples that have metadata and marks those that have none.

    Autocast is off inside: sines of bfloat16 angles are noise.

    Args:
        encoder: Maps metadata to (B, R). It may have `present(metadata) -> (B,) bool`, without which a sample is absent
            where one of its floats is NaN, and `check(metadata)`, which raises on what it cannot take.
        out_features: R; None reads `encoder.out_features`.
        coverage: In evaluation mode, samples whose metadata it does not cover count as absent.

    Raises:
        MetadataError: R is neither given nor an attribute of the encoder.
    """

    def __init__(self, encoder: nn.Module, out_features: int | None = None, coverage: Coverage | None = None) -> None:
        super().__init__()
        out_features = out_features or getattr(encoder, "out_features", None)
        if out_features is None:
            raise MetadataError.of("metadata_features", None, "give the encoder's width or an attribute out_features")
        self.encoder: Any = encoder  # a module of the user's own, which may have the two methods
        self.out_features = out_features
        self.coverage = coverage
        self.knows_presence: Final[bool] = hasattr(encoder, "present")
        self.checks: Final[bool] = hasattr(encoder, "check")

    def forward(self, x: Tensor, metadata: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:  # noqa: UP045 (TorchScript)
        """Encodes the metadata of a batch.

        Args:
            x: (B, ...) the images, which give the batch size.
            metadata: (B, ...), or None when no sample has any.

        Returns:
            The embedding (B, R) and presence (B,) bool; the embedding means nothing where nothing is present.

        Raises:
            MetadataError: Another batch size, or what the encoder refuses.
        """
        if metadata is None:
            return self._absent(x)
        if torch.jit.is_scripting():
            return self._encode(metadata)
        else:  # noqa: RET505 (TorchScript skips only the other branch of its own test)
            if values_readable(metadata):
                self._check(x, metadata)
            with without_autocast(x.device.type):
                return self._encode(metadata)

    def _encode(self, metadata: Tensor) -> tuple[Tensor, Tensor]:
        present = self.encoder.present(metadata) if self.knows_presence else _without_nan(metadata)
        absent = ~present.view([-1] + [1] * (metadata.dim() - 1))
        known = metadata.masked_fill(absent, 0)
        embedding = self.encoder(known)
        if self.coverage is not None and not self.training:
            present = present & self.coverage(known)
        return embedding, present

    def _absent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding, present = _nothing_known(x, self.out_features)
        if not torch.jit.is_scripting() and self.training:
            # Distributed training wants a gradient, if only zero, for every parameter
            embedding = embedding + sum(parameter.sum() for parameter in self.encoder.parameters()) * 0.0
        return embedding, present

    @torch.jit.unused
    def _check(self, x: Tensor, metadata: Tensor) -> None:
        if metadata.ndim == 0 or metadata.shape[0] != x.shape[0]:
            raise MetadataError.of("metadata shape", tuple(metadata.shape), f"give one row per image, {x.shape[0]}")
        if self.checks:
            self.encoder.check(metadata)


class NoMetadata(nn.Module):
    """In place of an encoder in a network whose remaining layers read no metadata: whatever comes, nothing is known.

    Args:
        out_features: R; may be 0.
    """

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor, metadata: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:  # noqa: UP045
        """(B, ...) images -> zeros (B, R), and (B,) bool, all False."""
        return _nothing_known(x, self.out_features)


def _nothing_known(x: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    embedding = torch.zeros(x.shape[0], out_features, device=x.device, dtype=x.dtype)
    return embedding, torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)


def _without_nan(metadata: Tensor) -> Tensor:
    """(B, ...) -> (B,) bool: no entry of the sample is NaN."""
    return ~metadata.isnan().flatten(1).any(dim=1) if metadata.dim() > 1 else ~metadata.isnan()


COLUMN_FEATURES = 64  # of the embedding of each column; the paper, which routes by places alone, gives none


class NumberEncoder(OwnParameters):
    """A number, standardized, then a small network 1 -> hidden -> R; zeros where it is unknown.

    Args:
        mean: What becomes 0, usually the mean over the training images.
        std: What becomes 1, usually their standard deviation; positive.
        out_features: R.
        device: Where the parameters are made.
        dtype: Their type.

    Raises:
        MetadataError: `std` is not positive.
    """

    def __init__(
        self,
        mean: float,
        std: float,
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
        """Draws as torch does for linear layers, whose biases spread the hidden units over the numbers."""
        self.hidden.reset_parameters()
        self.last.reset_parameters()

    def forward(self, numbers: Tensor) -> Tensor:
        """(B,) numbers, NaN where unknown -> (B, R)."""
        unknown = numbers.isnan()
        standard = ((numbers - self.mean) / self.std).masked_fill(unknown, 0.0)
        return self.last(F.gelu(self.hidden(standard.unsqueeze(1)))) * (~unknown).unsqueeze(1)


class ColumnsEncoder(nn.Module):
    """The embeddings of a place and of each further number, one behind the other; unknown ones are zeros.

    A sample has metadata if any of them is known, so that numbers may route where no place is known.

    Args:
        location: Encoder of longitude and latitude.
        columns: Name of each column -> mean and standard deviation, by which its numbers are standardized.
        device: Where the parameters are made.
        dtype: Their type.

    Raises:
        MetadataError: `location` encodes no coordinates, or a standard deviation is not positive.
    """

    def __init__(
        self,
        location: nn.Module,
        columns: Mapping[str, Sequence[float]],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(location, CoordinateEncoder):
            remedy = "columns stand beside coordinates; choose an encoder of these, such as spherical_harmonics"
            raise MetadataError.of("metadata_columns", list(columns), remedy)
        self.location = location
        self.columns = tuple(columns)
        self.numbers = nn.ModuleList(
            NumberEncoder(mean, std, device=device, dtype=dtype) for mean, std in columns.values()
        )
        self.out_features = location.out_features + COLUMN_FEATURES * len(self.columns)

    def present(self, metadata: Tensor) -> Tensor:
        """(B, 2 + C) -> (B,) bool: the place or one of the numbers is known (not NaN)."""
        return self.location.present(metadata[:, :2]) | ~metadata[:, 2:].isnan().all(dim=1)

    @torch.jit.unused
    def check(self, metadata: Tensor) -> None:
        """Refuses metadata without these columns, and what its encoder refuses of the place.

        Raises:
            MetadataError: Another width, or no longitude and latitude in degrees.
        """
        if metadata.ndim != 2 or metadata.shape[1] != 2 + len(self.columns):
            wanted = f"give (batch, {2 + len(self.columns)}): longitude, latitude, {', '.join(self.columns)}"
            raise MetadataError.of("metadata shape", tuple(metadata.shape), wanted)
        self.location.check(metadata[:, :2])

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2 + C) longitude, latitude in degrees and the columns, NaN where unknown -> (B, R)."""
        known = self.location.present(metadata[:, :2]).unsqueeze(1)
        parts = [self.location(metadata[:, :2].masked_fill(~known, 0.0)) * known]
        for index, number in enumerate(self.numbers):
            parts.append(number(metadata[:, 2 + index]))
        return torch.cat(parts, dim=1)
