"""The processes of a run: what they were launched with, and whether all of them are still there."""
