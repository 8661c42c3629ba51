"""Networks as programs for other runtimes, checked against the network and timed beside it."""
