"""Expert layers: routers, stacked experts, and the feed-forward layers made of them."""

from .encoders import (
    LOCATION_ENCODERS,
    ColumnsEncoder,
    Coverage,
    LocationEncoder,
    LocationIdEmbedding,
    MetadataEncoder,
    NoMetadata,
    SatClipEncoder,
    SinCosEncoder,
    load_satclip,
    save_satclip,
    spherical_harmonics,
    thin_coordinates,
)
from .experts import dispatch_info, set_dispatch
from .geo_moe_mlp import GeoMoeMlp
from .mixture_options import GeoMixtureOptions, MixtureOptions
from .moe_mlp import MoeMlp, RoutedMlp
from .own_parameters import OwnParameters, undecayed_parameters
from .router import CosineRouter, LinearRouter, MetadataRouter, Router, RouterOutput, register_router

__all__ = [
    "LOCATION_ENCODERS",
    "ColumnsEncoder",
    "CosineRouter",
    "Coverage",
    "GeoMixtureOptions",
    "GeoMoeMlp",
    "LinearRouter",
    "LocationEncoder",
    "LocationIdEmbedding",
    "MetadataEncoder",
    "MetadataRouter",
    "MixtureOptions",
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
    "set_dispatch",
    "spherical_harmonics",
    "thin_coordinates",
    "undecayed_parameters",
]
