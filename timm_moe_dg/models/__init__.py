"""Registered models, their classes, and upcycling of other networks. Importing this registers the models with timm."""

from ._geo_vit import GeoMoeVisionTransformer
from ._metadata import MetadataOptions, MetadataRoutingOptions
from ._moe_vit import MoeVisionTransformer
from .d3g import DomainHeadsVisionTransformer, d3g_tiny_patch16
from .erm_le import LocationVisionTransformer, erm_le_tiny_patch16
from .gmoe import gmoe_base_patch16, gmoe_small_patch16, gmoe_tiny_patch16
from .hybrid_sfmoe import hybrid_sfmoe_r26_s16
from .moge import moge_small_patch32_384, moge_tiny
from .sfmoe import sfmoe_small
from .text_head import use_text_head
from .upcycling import upcycle, upcycle_with_metadata

__all__ = [
    "DomainHeadsVisionTransformer",
    "GeoMoeVisionTransformer",
    "LocationVisionTransformer",
    "MetadataOptions",
    "MetadataRoutingOptions",
    "MoeVisionTransformer",
    "d3g_tiny_patch16",
    "erm_le_tiny_patch16",
    "gmoe_base_patch16",
    "gmoe_small_patch16",
    "gmoe_tiny_patch16",
    "hybrid_sfmoe_r26_s16",
    "moge_small_patch32_384",
    "moge_tiny",
    "sfmoe_small",
    "upcycle",
    "upcycle_with_metadata",
    "use_text_head",
]
