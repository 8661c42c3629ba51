"""Measuring: time, interleaved and with quartiles; peak memory; multiply-accumulates."""
