"""Mixture layers: routers, stacked experts, the feed-forward layers composed of them, and metadata encoders."""

from .encoders.coverage import Coverage, thin_coordinates
from .encoders.location import LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .encoders.metadata import ColumnsEncoder, MetadataEncoder, NoMetadata
from .encoders.pretrained import SatClipEncoder, load_satclip
from .experts import expert_implementation_info, set_expert_implementation
from .geo_moe_mlp import GeoMoeMlp
from .mixture_options import GeoMixtureOptions, MixtureOptions
from .moe_mlp import MoeMlp, RoutedMlp, after_step
from .parameters import OwnParameters, layer_parameters, undecayed_parameters
from .reports import LossWeights, ReportedLoss, RouterOutput
from .router import Router
from .routers import CosineRouter, LinearRouter, MetadataRouter, RandomRouter, SelfRouter, register_router

__all__ = [
    "ColumnsEncoder",
    "CosineRouter",
    "Coverage",
    "GeoMixtureOptions",
    "GeoMoeMlp",
    "LinearRouter",
    "LocationEncoder",
    "LocationIdEmbedding",
    "LossWeights",
    "MetadataEncoder",
    "MetadataRouter",
    "MixtureOptions",
    "MoeMlp",
    "NoMetadata",
    "OwnParameters",
    "RandomRouter",
    "ReportedLoss",
    "RoutedMlp",
    "Router",
    "RouterOutput",
    "SatClipEncoder",
    "SelfRouter",
    "SinCosEncoder",
    "after_step",
    "expert_implementation_info",
    "layer_parameters",
    "load_satclip",
    "register_router",
    "set_expert_implementation",
    "spherical_harmonics",
    "thin_coordinates",
    "undecayed_parameters",
]
