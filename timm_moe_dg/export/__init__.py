"""Models as programs for other runtimes."""
