"""Trained networks on data: scores of labeled domains, and classes of image files."""
