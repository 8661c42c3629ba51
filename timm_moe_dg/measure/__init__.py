"""Measuring: time, interleaved and with quartiles, and peak memory."""
