"""Expert layers: routers, stacked experts, and the feed-forward layers made of them."""

from .geo_moe_mlp import GeoMoeMlp
from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, spherical_harmonics
from .metadata import MetadataEncoder
from .moe_mlp import MoeMlp, RoutedMlp
from .router import CosineRouter, LinearRouter, MetadataRouter, RouterOutput

__all__ = [
    "LOCATION_ENCODERS",
    "CosineRouter",
    "GeoMoeMlp",
    "LinearRouter",
    "LocationEncoder",
    "LocationIdEmbedding",
    "MetadataEncoder",
    "MetadataRouter",
    "MoeMlp",
    "RoutedMlp",
    "RouterOutput",
    "spherical_harmonics",
]
