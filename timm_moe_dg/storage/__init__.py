"""Run folders with their checkpoints, and atomic writes and locks of files and folders."""
