"""Metadata encoders: from places and location ids to the context that routes."""

from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .metadata import MetadataEncoder, NoMetadata
from .satclip import SatClipEncoder, load_satclip, save_satclip

__all__ = [
    "LOCATION_ENCODERS",
    "LocationEncoder",
    "LocationIdEmbedding",
    "MetadataEncoder",
    "NoMetadata",
    "SatClipEncoder",
    "SinCosEncoder",
    "load_satclip",
    "save_satclip",
    "spherical_harmonics",
]
