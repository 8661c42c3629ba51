"""Run folders, checkpoints and locks, and atomic writes of files and folders."""
