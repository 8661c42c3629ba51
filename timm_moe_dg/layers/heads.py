"""Classifiers in place of a linear layer: embeddings of texts, as in CLIP, and D3G's head for each training domain.

Axes: B samples, M training domains, D features, C classes, P points of the index.
"""

import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MetadataError
from .encoders.coverage import Coverage, thin_coordinates
from .encoders.location import CoordinateEncoder
from .own_parameters import OwnParameters
from .precision import UpcastLinear, upcast, without_autocast

CLIP_SCALE = 100.0  # at which CLIP's training stops raising the scale (Radford et al., 2021, section 2.5)
RELATION_QUERIES = ("domain", "wrap")


class TextHead(nn.Module):
    """Scores images by the cosines of their features and the classes' weights (Radford et al., 2021, arXiv:2103.00020).

    Args:
        num_classes: Number of classes (C).
        width: Length of a text's embedding (E).
        in_features: Length of the features (D), which a linear layer projects to E; None if they have E already.

    Attributes:
        weight: Class weights (C, E) of any length.
        logit_scale: Logarithm of the factor from cosines to logits, which is the inverse of CLIP's temperature.
    """

    def __init__(self, num_classes: int, width: int, in_features: int | None = None) -> None:
        super().__init__()
        self.projection = nn.Linear(in_features, width) if in_features else nn.Identity()
        self.weight = nn.Parameter(torch.randn(num_classes, width))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(CLIP_SCALE)))

    def forward(self, features: Tensor) -> Tensor:
        """(B, D) features -> (B, C) logits, in float32 or better."""
        projected = self.projection(features)
        with without_autocast(features.device.type):  # bfloat16 has steps of 1/8 where CLIP's logits lie
            images = F.normalize(upcast(projected), dim=-1)
            texts = F.normalize(self.weight, dim=-1).to(images.dtype)
            return self.logit_scale.exp() * images @ texts.t()


class DomainHeads(OwnParameters):
    """One linear classifier for each training domain, on the same features (D3G, section 3.1)."""

    undecayed = ("bias",)
    stacked = MappingProxyType({"weight": 1, "bias": 1})

    def __init__(
        self,
        in_features: int,
        num_domains: int,
        num_classes: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # Classes come first, because timm reads their number from a classifier's first axis
        self.weight = nn.Parameter(torch.empty(num_classes, num_domains, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_classes, num_domains, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(D), as in torch's linear layers."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., M, C) logits of every head."""
        return torch.einsum("...d,cmd->...mc", x, self.weight) + self.bias.T


class DomainRelations(CoordinateEncoder):
    """How much a place is related to each training domain (D3G, section 3.2).

    The relation to domain i is beta [i = d] + (1 - beta) cos(w * q, w * g(i)). The place belongs to domain d. In
    training the data state it, in a third column of the metadata. Without that column it is the domain of the nearest
    training coordinate in an index. A small network g reads the domain's number. The query q is g(d), or for 'wrap' a
    network of the sine and cosine of longitude and latitude, and w is a learned vector.

    Crasto (2025) has this form, with one vector w where D3G has several. Its code reads d from the data set's table.

    Args:
        num_domains: M.
        num_points: P; the points are set by `set_domains` or loaded from a checkpoint.
        beta: Weight of the fixed relation [i = d].
        query: 'domain' or 'wrap'.
        features: Width of the vectors that are compared.
    """

    owners: Tensor  # domain of each point

    def __init__(
        self,
        num_domains: int,
        num_points: int = 0,
        *,
        beta: float = 0.8,
        query: str = "domain",
        features: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if query not in RELATION_QUERIES:
            raise MetadataError.of("relation_query", query, f"choose one of {RELATION_QUERIES}")
        if not 0 <= beta <= 1:
            raise MetadataError.of("relation_beta", beta, "give a share from 0 to 1")
        self.num_domains, self.beta = num_domains, beta
        self.out_features = 2 * num_domains
        self.index = Coverage(num_points, device=device)
        self.register_buffer("owners", torch.zeros(num_points, dtype=torch.int64, device=device))

        def network(inputs: int) -> nn.Sequential:
            first = UpcastLinear(inputs, features // 2, device=device, dtype=dtype)
            return nn.Sequential(first, nn.ReLU(), UpcastLinear(features // 2, features, device=device, dtype=dtype))

        self.keys = network(1)
        self.queries = network(4) if query == "wrap" else None
        self.scale = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        nn.init.uniform_(self.scale)

    def reset_parameters(self) -> None:
        """The default of torch for the networks, and uniform from 0 to 1 for w."""
        for layer in (*self.keys, *(self.queries or ())):
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        nn.init.uniform_(self.scale)

    def set_domains(self, lonlat: Sequence[Tensor]) -> int:
        """Makes the index from the (N, 2) training coordinates of each domain, in degrees; returns P."""
        points = [thin_coordinates(part).points for part in lonlat]
        device = self.owners.device
        owners = torch.arange(len(points)).repeat_interleave(torch.tensor([len(part) for part in points]))
        self.index = Coverage(len(owners)).hold(torch.cat(points)).to(device).train(self.training)
        self.owners = owners.to(device)
        return len(owners)

    def check(self, metadata: Tensor) -> None:
        """Checks the coordinates, and that no domain is stated which has no head."""
        super().check(metadata[:, :2] if metadata.ndim == 2 and metadata.shape[1] == 3 else metadata)
        if metadata.shape[1] == 3 and metadata.device.type == "cpu" and len(metadata):
            largest = metadata[:, 2].nan_to_num(nan=0.0).max().item()
            if largest >= self.num_domains:
                raise MetadataError.of("domain", largest, f"give numbers 0..{self.num_domains - 1}, or NaN for unknown")

    def present(self, metadata: Tensor) -> Tensor:
        """(B, 2 or 3) -> (B,) bool, True where the domain can be found: known coordinates, and an index."""
        return super().present(metadata[:, :2]) & (len(self.owners) > 0)

    def forward(self, metadata: Tensor) -> Tensor:
        """(B, 2 or 3) degrees, and the domain or NaN -> (B, 2 M): the relations, then the fixed ones, [i = d]."""
        if not len(self.owners):
            return torch.zeros(len(metadata), self.out_features, device=metadata.device, dtype=self.scale.dtype)
        lonlat = metadata[:, :2]
        domain = self.owners[self.index.nearest(lonlat)]
        if metadata.shape[1] == 3:
            stated = metadata[:, 2]
            domain = torch.where(stated.isnan(), domain, stated.nan_to_num(nan=0.0).long())
        fixed = F.one_hot(domain, self.num_domains).to(self.scale.dtype)
        numbers = torch.arange(self.num_domains, device=metadata.device)
        keys = self.keys(numbers.to(self.scale.dtype).unsqueeze(1))
        if self.queries is None:
            queries = keys[domain]
        else:
            angles = torch.deg2rad(lonlat.double())
            queries = self.queries(torch.cat([angles.cos(), angles.sin()], dim=1).to(self.scale.dtype))
        learned = F.cosine_similarity((self.scale * queries).unsqueeze(1), self.scale * keys, dim=-1)
        return torch.cat([self.beta * fixed + (1 - self.beta) * learned, fixed], dim=1)
