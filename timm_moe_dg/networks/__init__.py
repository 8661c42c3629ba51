"""Networks: built with their starting weights, loaded as they were trained, frozen in part, and saved."""

from .build import build_network, data_config, save_network
from .freeze import freeze_backbone
from .trained import load_trained

__all__ = ["build_network", "data_config", "freeze_backbone", "load_trained", "save_network"]
