"""Readers: the layouts in which data sets come, each opened as a list of domains."""
