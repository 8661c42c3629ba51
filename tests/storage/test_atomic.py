"""Files and folders are complete or as they were, also when the system refuses to write."""

import contextlib
import resource
import signal

import pytest
import torch
from safetensors.torch import save_file

from timm_moe_dg.errors import StorageError
from timm_moe_dg.storage.atomic import append_line, recovered, replaced, write_text


@contextlib.contextmanager
def full_disk(limit):
    """Makes every write beyond `limit` bytes of a file fail, for real; the error is EFBIG instead of ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_cannot_be_written_stays_as_it_was(tmp_path):
    with replaced(tmp_path / "best") as fresh:
        (fresh / "weights").write_text("good")
    before = content(tmp_path)
    complaint = r"output='.*best': cannot be written .*--resume"
    with pytest.raises(StorageError, match=complaint), full_disk(1000), replaced(tmp_path / "best") as fresh:
        (fresh / "weights").write_bytes(bytes(2000))
    assert content(tmp_path) == before


def test_safetensors_failure_is_named_too(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"), full_disk(1000), replaced(tmp_path / "best") as fresh:
        save_file({"weight": torch.zeros(1000)}, fresh / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    write_text(tmp_path / "summary.csv", "good")
    with pytest.raises(StorageError, match=r"summary\.csv"), full_disk(1000):
        write_text(tmp_path / "summary.csv", "x" * 2000)
    assert content(tmp_path) == {"summary.csv": b"good"}


def test_a_line_is_appended_or_not_at_all(tmp_path):
    path = tmp_path / "results.jsonl"
    append_line(path, "one")
    with pytest.raises(StorageError, match=r"results\.jsonl"), full_disk(1000):
        append_line(path, "x" * 2000)
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


def test_what_a_killed_process_left_is_settled(tmp_path):
    for name in (".best.old", ".best.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    recovered(tmp_path / "best")
    assert content(tmp_path) == {"best/weights": b".best.old"}
