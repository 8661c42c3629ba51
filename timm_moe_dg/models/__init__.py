"""Registered models, their classes, and upcycling of other networks. Importing this registers the models with timm."""

from . import backbone
from .d3g import DomainHeadsVisionTransformer, d3g_tiny_patch16
from .erm_le import LocationVisionTransformer, classify_with_metadata, erm_le_tiny_patch16
from .gmoe import (
    MoeVisionTransformer,
    gmoe_base_patch16,
    gmoe_small_patch16,
    gmoe_tiny_patch16,
    hybrid_sfmoe_r26_s16,
    sfmoe_small,
)
from .metadata_options import MetadataOptions, MetadataRoutingOptions
from .moge import GeoMoeVisionTransformer, moge_small_patch32_384, moge_tiny
from .text_head import use_text_head
from .upcycling import upcycle, upcycle_with_metadata

__all__ = [
    "DomainHeadsVisionTransformer",
    "GeoMoeVisionTransformer",
    "LocationVisionTransformer",
    "MetadataOptions",
    "MetadataRoutingOptions",
    "MoeVisionTransformer",
    "backbone",
    "classify_with_metadata",
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
