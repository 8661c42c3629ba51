"""The runs of a sweep: as processes on this machine, or as jobs of a cluster."""
