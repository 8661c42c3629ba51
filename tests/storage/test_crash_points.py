"""A run that is killed at a file-system event resumes to the same folder; `crash_points.py` tries all events."""

import os

import pytest

from tests.storage.crash_points import PLANS, differences

pytestmark = pytest.mark.slow  # each kill is a process


@pytest.mark.parametrize("plan", PLANS)
def test_a_killed_run_resumes_to_the_same_folder(tmp_path, monkeypatch, plan):
    # A killed process has written what it has; waiting for the disk is for power failures, and takes long
    monkeypatch.setattr(os, "fsync", lambda _: None)
    kills, differing = differences(tmp_path, 23, **PLANS[plan])
    assert kills > 2
    assert differing == []
