"""Mixture layers: routers, stacked experts, the feed-forward layers composed of them, and metadata encoders."""

from .encoders.location import LocationIdEmbedding
from .experts import expert_implementation_info, set_expert_implementation
from .geo_moe_mlp import GeoMoeMlp
from .mixture_options import GeoMixtureOptions, MixtureOptions
from .moe_mlp import MoeMlp, RoutedMlp, after_step
from .parameters import layer_parameters
from .reports import LossWeights, ReportedLoss, RouterOutput
from .router import Router
from .routers import CosineRouter, LinearRouter, register_router

__all__ = [
    "CosineRouter",
    "GeoMixtureOptions",
    "GeoMoeMlp",
    "LinearRouter",
    "LocationIdEmbedding",
    "LossWeights",
    "MixtureOptions",
    "MoeMlp",
    "ReportedLoss",
    "RoutedMlp",
    "Router",
    "RouterOutput",
    "after_step",
    "expert_implementation_info",
    "layer_parameters",
    "register_router",
    "set_expert_implementation",
]
