"""Files and folders that are complete at every moment: run folders, checkpoints, results."""

from .run_folder import RunFolder

__all__ = ["RunFolder"]
