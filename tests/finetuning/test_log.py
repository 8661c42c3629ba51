"""Messages reach the screen at once, and log.txt as soon as the run has a folder."""

import logging
import re
import sys
from types import SimpleNamespace

import pytest

from timm_moe_dg.errors import ArgumentError, StorageError
from timm_moe_dg.finetuning.log import RunLog

LOGGER = logging.getLogger("timm_moe_dg.anything")


@pytest.fixture
def folder(tmp_path):
    """A run folder without an evaluation."""
    return SimpleNamespace(path=tmp_path / "a", records=[])


def evaluated(folder):
    folder.path.mkdir()
    folder.records.append("record")


def test_messages_are_shown_at_once_and_written_when_there_is_a_folder(folder, capsys, monkeypatch):
    # pytest's own log capture would send the unpaired surrogate to xdist, which cannot encode it
    monkeypatch.setattr(logging.getLogger("timm_moe_dg"), "propagate", False)
    sys.stdout.reconfigure(errors="backslashreplace")  # as `cli.tool.tool` does

    def run():
        with RunLog(["--lr", "a b"]) as log:
            LOGGER.info("one")
            log.folder = folder
            LOGGER.info("two \udcff\x1b[0m")
            assert not folder.path.exists()
            evaluated(folder)
            LOGGER.info("three")
            raise ArgumentError("lr=7: too high")

    with pytest.raises(ArgumentError):
        run()
    assert capsys.readouterr().out.splitlines() == ["one", r"two \udcff\x1b[0m", "three"]
    first, *rest = (folder.path / "log.txt").read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d finetune.py --lr 'a b'", first)
    assert rest == ["one", r"two \udcff\x1b[0m", "three", "ArgumentError: lr=7: too high"]
    LOGGER.info("after the run")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("variable", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_other_processes_show_errors_alone_and_write_nothing(folder, capsys, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    evaluated(folder)
    with RunLog([]) as log:
        log.folder = folder
        LOGGER.info("hidden")
        LOGGER.error("shown")
    assert capsys.readouterr().out == "shown\n"
    assert not (folder.path / "log.txt").exists()


def test_a_log_that_cannot_be_written_is_one_line(folder, monkeypatch):
    def refuse(*_):
        raise OSError("No space left on device")

    evaluated(folder)
    with RunLog([]) as log, monkeypatch.context() as patch:
        log.folder = folder
        patch.setattr(logging.StreamHandler, "flush", refuse)
        with pytest.raises(StorageError, match=r"log.txt': cannot be written .No space"):
            LOGGER.info("one")
