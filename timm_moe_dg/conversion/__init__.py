"""Converts checkpoints of other programs to this package's parameter names."""
