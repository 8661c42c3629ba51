"""Readers: functions that open a data set's files as a list of domains."""

from .csv_tables import below, choice, coordinates, number, numeric, parsed, read_csv
from .digits import DigitsDomain, colored_digits, geo_digits, rotated_digits
from .folders import FolderDomain, read_domain_net, read_folder
from .hub_data import HubDomain, read_hub
from .image_files import ImageFiles, find_images, image_loader, read_metadata
from .images import read_image, read_pixels
from .mnist import FASHION_MNIST, MNIST, IdxRelease, read_colored, read_rotated
from .places import Places, PlacesDomain, domains_of, read_place_folder
from .sprites import SpritesDomain, sprites
from .wilds import read_camelyon, read_fmow, read_fmow_by_region, read_fmow_lao, read_iwildcam

__all__ = [
    "FASHION_MNIST",
    "MNIST",
    "DigitsDomain",
    "FolderDomain",
    "HubDomain",
    "IdxRelease",
    "ImageFiles",
    "Places",
    "PlacesDomain",
    "SpritesDomain",
    "below",
    "choice",
    "colored_digits",
    "coordinates",
    "domains_of",
    "find_images",
    "geo_digits",
    "image_loader",
    "number",
    "numeric",
    "parsed",
    "read_camelyon",
    "read_colored",
    "read_csv",
    "read_domain_net",
    "read_fmow",
    "read_fmow_by_region",
    "read_fmow_lao",
    "read_folder",
    "read_hub",
    "read_image",
    "read_iwildcam",
    "read_metadata",
    "read_pixels",
    "read_place_folder",
    "read_rotated",
    "rotated_digits",
    "sprites",
]
