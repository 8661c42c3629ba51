"""What trained networks do and cost: routing of patches and places, learning curves, pictures, operation counts."""
