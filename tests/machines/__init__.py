"""Two machines that train one run."""
