"""Routing of patches: expert maps, attention maps, association with parts and attributes, invariance to domains."""
