"""How every tool ends."""

from timm_moe_dg.cli.ending import explain
from timm_moe_dg.errors import CheckpointError, ImageReadError


def test_explanation_drops_a_worker_s_traceback_and_nothing_else():
    wrapped = """Caught ImageReadError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 1, in loop
timm_moe_dg.errors.ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it
"""
    expected = "ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it"
    assert explain(ImageReadError(wrapped)) == expected
    assert explain(CheckpointError("two\nlines")) == "CheckpointError: two lines"
