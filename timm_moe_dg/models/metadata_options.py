"""Metadata of a model: options, encoders by name, and the index of training coordinates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import MetadataError
from ..layers.encoders.location import (
    LOCATION_ENCODERS,
    LocationEncoder,
    LocationIdEmbedding,
    SinCosEncoder,
)
from ..layers.encoders.metadata import ColumnsEncoder, MetadataEncoder
from ..layers.encoders.pretrained import load_geoclip, load_satclip

GEOCLIP, SATCLIP_PREFIX = "geoclip", "satclip:"


@dataclass(frozen=True, kw_only=True)
class MetadataOptions:
    """Options of reading metadata: of `GeoMoeVisionTransformer`, `LocationVisionTransformer`, `upcycle_with_metadata`.

    Attributes:
        metadata_encoder: 'spherical_harmonics', 'sincos', 'geoclip', 'satclip:FILE', 'location_id', or a module. The
            first four take longitude and latitude in degrees, float (B, 2). 'geoclip' and 'satclip:FILE_OR_REPOSITORY'
            have published weights, of the PyPI package geoclip and of a file (see `load_satclip`). 'location_id' takes
            int64 (B,). A module maps metadata to (B, R) and is not recorded in saved configurations.
        metadata_frozen: Whether the published weights of 'geoclip' and 'satclip:FILE' stay as they are.
        metadata_drop: Dropout rate inside 'spherical_harmonics'. The default of 0.5 is that of SatCLIP's code (MoGE's
            text has no dropout). It hides from the router most of where an image is. Trained from scratch on few
            images, no domains form until it is lowered.
        metadata_features: Width of the embedding (R). None means 256, or the module's `out_features`.
        num_locations: Number of locations for 'location_id'.
        seen_locations: Ids of the training images. In evaluation, all others count as unknown. None takes all ids.
        metadata_columns: Mean and standard deviation of each further column. Columns follow longitude and latitude in
            the metadata, and each has an encoder of its own. The statistics are of the training images, by name.

    >>> model = timm.create_model("moge_tiny", metadata_encoder="location_id", num_locations=12).eval()
    >>> logits = model(torch.randn(2, 3, 224, 224), torch.tensor([3, -1]))  # -1 is an unknown location
    """

    metadata_encoder: str | nn.Module = "spherical_harmonics"
    metadata_frozen: bool = True
    metadata_drop: float = 0.5
    metadata_features: int | None = None
    num_locations: int = 323
    seen_locations: Sequence[int] | None = None
    metadata_columns: Mapping[str, Sequence[float]] | None = None

    def build_encoder(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> MetadataEncoder:
        """Builds the encoder, with encoders of further columns around it if there are any."""
        given = self.metadata_encoder if isinstance(self.metadata_encoder, nn.Module) else None
        encoder = given or self._encoder_by_name(str(self.metadata_encoder), device, dtype)
        if self.metadata_columns:
            return MetadataEncoder(ColumnsEncoder(encoder, self.metadata_columns, device=device, dtype=dtype))
        return MetadataEncoder(encoder, self.metadata_features if given is not None else None)

    def _encoder_by_name(self, name: str, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Module:
        width = self.metadata_features or 256
        if name == GEOCLIP or name.startswith(SATCLIP_PREFIX):
            published = load_geoclip() if name == GEOCLIP else load_satclip(name.removeprefix(SATCLIP_PREFIX))
            if self.metadata_features not in (None, published.out_features):
                remedy = f"{name!r} has a width of {published.out_features}; leave it out"
                raise MetadataError.of("metadata_features", self.metadata_features, remedy)
            return published.to(device, dtype).requires_grad_(not self.metadata_frozen)
        if name == "spherical_harmonics":
            return LocationEncoder(width, drop=self.metadata_drop, device=device, dtype=dtype)
        if name == "sincos":
            return SinCosEncoder(width, device=device, dtype=dtype)
        if name == "location_id":
            known = {"seen_locations": self.seen_locations}
            return LocationIdEmbedding(self.num_locations, width, **known, device=device, dtype=dtype)
        choices = f"{(*LOCATION_ENCODERS, GEOCLIP)}, '{SATCLIP_PREFIX}FILE_OR_REPOSITORY'"
        remedy = f"choose one of {choices}, or give an nn.Module"
        raise MetadataError.of("metadata_encoder", name, remedy)


@dataclass(frozen=True, kw_only=True)
class MetadataRoutingOptions(MetadataOptions):
    """Options of routing by metadata: those of `MetadataOptions`, and where the router is trusted.

    Attributes:
        coverage_points: Size of the index of training coordinates. It comes with the weights. `set_coverage` makes an
            index.
        coverage_radius: Distance in km from cells of training coordinates beyond which the shared expert answers. This
            holds in evaluation. Cells have 0.25 degrees or more, so that a model reveals no exact coordinate, and the
            distance is to their centers. None routes all images.

    >>> model = timm.create_model("moge_tiny").eval()
    >>> coverage = model.set_coverage(torch.tensor([[13.4, 52.5]]))
    >>> model.set_coverage_radius(500.0)  # the shared expert answers farther than 500 km from Berlin
    """

    coverage_points: int = 0
    coverage_radius: float | None = None
