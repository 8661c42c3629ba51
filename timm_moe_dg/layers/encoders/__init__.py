"""Metadata encoders: coordinates, location ids and other numbers to the embedding that MoGE's routers read."""
