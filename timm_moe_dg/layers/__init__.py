"""Expert layers: routers, stacked experts, and the feed-forward layers made of them."""

from .experts import dispatch_info
from .geo_moe_mlp import GeoMoeMlp
from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .metadata import MetadataEncoder
from .moe_mlp import MoeMlp, RoutedMlp
from .router import CosineRouter, LinearRouter, MetadataRouter, RouterOutput
from .satclip import SatClipEncoder, load_satclip, save_satclip

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
    "SatClipEncoder",
    "SinCosEncoder",
    "dispatch_info",
    "load_satclip",
    "save_satclip",
    "spherical_harmonics",
]
