"""Command lines of the tools: options, error messages and escaping."""
