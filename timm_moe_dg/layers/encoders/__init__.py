"""Metadata encoders: coordinates, location ids and other numbers to the embedding that MoGE's routers read."""

from .coverage import Coverage, thin_coordinates
from .location import LOCATION_ENCODERS, LocationEncoder, LocationIdEmbedding, SinCosEncoder, spherical_harmonics
from .metadata import ColumnsEncoder, MetadataEncoder, NoMetadata, NumberEncoder
from .satclip import SatClipEncoder, load_satclip, save_satclip

__all__ = [
    "LOCATION_ENCODERS",
    "ColumnsEncoder",
    "Coverage",
    "LocationEncoder",
    "LocationIdEmbedding",
    "MetadataEncoder",
    "NoMetadata",
    "NumberEncoder",
    "SatClipEncoder",
    "SinCosEncoder",
    "load_satclip",
    "save_satclip",
    "spherical_harmonics",
    "thin_coordinates",
]
