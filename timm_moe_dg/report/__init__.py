"""HTML reports of runs and sweeps, each in one self-contained file."""
