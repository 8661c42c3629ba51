"""A cluster of Slurm's on one machine, and what happens to a sweep there."""
