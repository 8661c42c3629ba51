"""Run folders, checkpoints and locks, and atomic writes of files and folders."""

from .run_folder import RunFolder

__all__ = ["RunFolder"]
