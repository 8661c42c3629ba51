"""The registered models; importing this registers them with timm."""

from .erm_le import erm_le_tiny_patch16
from .gmoe import gmoe_base_patch16, gmoe_small_patch16, gmoe_tiny_patch16
from .hybrid_sfmoe import hybrid_sfmoe_r26_s16
from .moge import moge_small_patch32_384, moge_tiny
from .sfmoe import sfmoe_small

__all__ = [
    "erm_le_tiny_patch16",
    "gmoe_base_patch16",
    "gmoe_small_patch16",
    "gmoe_tiny_patch16",
    "hybrid_sfmoe_r26_s16",
    "moge_small_patch32_384",
    "moge_tiny",
    "sfmoe_small",
]
