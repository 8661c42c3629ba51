"""Protocols: options, records, evaluation, selection rules and plans of runs."""
