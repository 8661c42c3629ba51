"""Readers: functions that open a data set's files as a list of domains."""
