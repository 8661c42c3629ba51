"""Expert layers: routers, stacked experts, and the feed-forward layers made of them."""

from .experts import dispatch_info
from .geo_moe_mlp import GeoMoeMlp
from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .metadata import MetadataEncoder, NoMetadata
from .moe_mlp import MoeMlp, RoutedMlp
from .own_parameters import OwnParameters, undecayed_parameters
from .router import CosineRouter, LinearRouter, MetadataRouter, Router, RouterOutput, register_router
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
    "NoMetadata",
    "OwnParameters",
    "RoutedMlp",
    "Router",
    "RouterOutput",
    "SatClipEncoder",
    "SinCosEncoder",
    "dispatch_info",
    "load_satclip",
    "register_router",
    "save_satclip",
    "spherical_harmonics",
    "undecayed_parameters",
]
