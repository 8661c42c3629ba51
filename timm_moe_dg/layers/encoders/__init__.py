"""Metadata encoders: from places and location ids to the context that routes."""

from .coverage import Coverage, thin_coordinates
from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .metadata import MetadataEncoder, NoMetadata
from .satclip import SatClipEncoder, load_satclip, save_satclip

__all__ = [
    "LOCATION_ENCODERS",
    "Coverage",
    "LocationEncoder",
    "LocationIdEmbedding",
    "MetadataEncoder",
    "NoMetadata",
    "SatClipEncoder",
    "SinCosEncoder",
    "load_satclip",
    "save_satclip",
    "spherical_harmonics",
    "thin_coordinates",
]
