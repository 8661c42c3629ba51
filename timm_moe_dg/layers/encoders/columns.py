"""Coordinates with further numbers beside them, such as a time or a sensor's: an encoder for each, concatenated.

Axes: B samples, C columns of numbers, R embedding features.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MetadataError
from ..own_parameters import OwnParameters
from ..precision import UpcastLinear
from .location import CoordinateEncoder

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
