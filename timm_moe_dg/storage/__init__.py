"""Files and folders that are complete at every moment: run folders, checkpoints, results."""

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from .run_folder import RunFolder

__all__ = ["RunFolder"]

__getattr__, __dir__ = exports(__name__, __file__)
