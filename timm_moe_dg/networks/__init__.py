"""Networks: building with starting weights, loading trained ones, freezing of parts, and saving."""

from .build import build_network, data_config, save_network
from .freeze import freeze_backbone
from .trained import load_trained

__all__ = ["build_network", "data_config", "freeze_backbone", "load_trained", "save_network"]
