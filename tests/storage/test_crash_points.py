"""A run that is killed at a file-system event goes on to the same folder; `crash_points.py` tries all events."""

import os

import pytest

from tests.storage.crash_points import differences

pytestmark = pytest.mark.slow  # each kill is a process


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch):
    """What a killed process has written stays written; waiting for the disk is for power failures, and takes long."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("options", [{}, {"can_go_on": True}, {"damaged": True}], ids=str)
def test_crash_points_are_made_up_for(tmp_path, options):
    kills, differing = differences(tmp_path, 23, **options)
    assert kills > 5
    assert differing == []
