"""Comparisons: sweeps of runs as jobs, rows without a network, and the answer which row to take."""
