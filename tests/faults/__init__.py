"""An attack on the code, kept: a new finding is one row of a table."""
