"""Tables and comparisons of finished runs, with the figures of the papers."""
