"""Checkpoints of other programs, under this package's names."""
