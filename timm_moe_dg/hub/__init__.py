"""Model cards and uploads to the Hugging Face Hub."""

from .card import write_card
from .folder import fill_from_network, fill_from_run, load_folder
from .origin import Origin, hub_link, published_source
from .push import push_folder

__all__ = [
    "Origin",
    "fill_from_network",
    "fill_from_run",
    "hub_link",
    "load_folder",
    "published_source",
    "push_folder",
    "write_card",
]
