"""How every tool ends."""

import multiprocessing
import os
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
import torch

from timm_moe_dg.cli.text import duration
from timm_moe_dg.cli.tool import LONGEST, explain, tool
from timm_moe_dg.errors import CheckpointError, ImageReadError


def test_explanation_drops_a_worker_s_traceback_and_nothing_else():
    wrapped = """Caught ImageReadError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 1, in loop
timm_moe_dg.errors.ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it
"""
    expected = "ImageReadError: image='a/b.png': cannot be decoded (ImageReadError: odd); repair it"
    assert explain(ImageReadError(wrapped)) == expected
    assert explain(CheckpointError("two\nlines")) == "CheckpointError: two\nlines"


@pytest.mark.parametrize("message", ["two\nlines", "\x1b[31m\u202e", "x" * 10 * LONGEST])
def test_an_ending_is_one_line_of_bearable_length(message):
    def main(argv):
        raise CheckpointError(message)

    with pytest.raises(SystemExit) as caught:
        tool(main)([])
    assert caught.value.code.startswith("test_ending.py: CheckpointError: ")
    assert caught.value.code.isprintable()
    assert len(caught.value.code) < LONGEST + 10


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."),
    ],
    ids=["gpu", "cpu"],
)
def test_full_memory_is_one_line(error):
    def main(argv):
        raise error

    with pytest.raises(SystemExit, match=r"^test_ending.py: memory is full; .* --batch-size .*allocate .*\.\)$"):
        tool(main)([])


def ends(status):
    def main(argv):
        if status == "Ctrl-C":
            raise KeyboardInterrupt
        raise SystemExit(status)

    return main


@pytest.mark.parametrize(("end", "status"), [("Ctrl-C", 130), (130, 130), (143, 143), (1, None), ("error", None)])
def test_a_program_that_was_interrupted_ends_without_cleanup_and_others_do_not(monkeypatch, end, status):
    events = []
    worker = SimpleNamespace(terminate=lambda: events.append("worker"))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [worker])
    monkeypatch.setattr(os, "_exit", events.append)
    with pytest.raises(SystemExit):
        tool(ends(end))([])  # called by another program
    assert events == []
    with pytest.raises(SystemExit):
        tool(ends(end))()
    assert events == ([] if status is None else ["worker", status])


def test_names_that_are_not_utf_8_are_printed(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        tool(lambda argv: stream.write("caf\udce9\n"))([])
    assert (tmp_path / "out").read_text() == "caf\\udce9\n"


def test_estimated_times_have_the_unit_that_fits():
    texts = [duration(seconds) for seconds in (0, 89, 90, 3600, 7200)]
    assert texts == ["about 0 s", "about 89 s", "about 2 min", "about 60 min", "about 2 h"]


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), HTTPError("https://x.org", 404, "Not Found", {}, None), OSError(22, "bug")]
)
def test_a_network_error_or_a_bug_keeps_its_traceback(error):
    def main(argv):
        raise error

    with pytest.raises(type(error)):
        tool(main)([])


def test_a_path_that_the_system_refuses_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"^test_ending\.py: .*File name too long: '.*x'; check the path"):
        tool(lambda argv: (tmp_path / ("x" * 256)).exists())([])
