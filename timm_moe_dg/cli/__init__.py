"""Command lines of the tools: their options' values, their configuration files and their endings."""
