"""What a run says on the screen, in log.txt and to trackers."""

import logging
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.invented import make_record
from timm_moe_dg.errors import ArgumentError, StorageError
from timm_moe_dg.finetuning.messages import RunLog, domain_table, start_trackers, tracker_errors_logged

LOGGER = logging.getLogger("timm_moe_dg.anything")
ARGS = {"model_kwargs": {"moe_layers": (8, 10)}, "test_domains": [1], "lr": 0.1}


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
    sys.stdout.reconfigure(errors="backslashreplace")  # as `cli.tool` does

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
    with RunLog([]) as log:
        log.folder = folder
        LOGGER.info("four")
    assert (folder.path / "log.txt").read_text().splitlines()[-1] == "four"


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


def test_table_has_a_row_for_each_domain_and_marks_the_test_domain():
    table = domain_table(make_record(), ["art", "cartoon", "photo"])
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["art"] == ["train", "0.9000", "0.6000"]
    assert rows["cartoon"] == ["test", "0.8000", "0.5000"]
    assert rows["photo"] == ["train", "0.7000", "0.4000"]
    assert "step 300" in table
    assert "task_loss 0.2500" in table
    assert "(mean of out acc) 0.5000; the accuracy on the held-out in-split 0.8000" in table
    record = replace(make_record(), out_acc=(0.6, math.nan, 0.4))  # no images in a split
    table = domain_table(replace(record, args={**record.args, "test_envs": []}), ["art", "cartoon", "photo"])
    assert [line.split()[2:] for line in table.splitlines() if "cartoon" in line] == [["0.8000", "-"]]
    assert table.endswith("training-domain validation (mean of out acc) 0.5000")


def logged(folder):
    events = EventAccumulator(str(folder / "tensorboard" / "timm_moe_dg")).Reload()
    return [(event.step, event.value) for event in events.Scalars("validation_acc")]


def track(folder, steps, first_step):
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=folder)
    start_trackers(accelerator, folder, ARGS, first_step)
    for step, value in steps.items():
        accelerator.log({"validation_acc": value}, step=step)
    accelerator.end_training()


def test_trackers_of_a_resumed_run_replace_the_entries_from_its_first_step_on(tmp_path):
    track(tmp_path, {0: 0.0, 4: 0.25, 8: 0.5}, 0)
    track(tmp_path, {8: 0.75}, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    assert logged(tmp_path) == [(0, 0.0), (4, 0.25), (8, 0.75)]


def test_runs_of_one_name_in_two_folders_are_two_to_weights_and_biases(tmp_path):
    accelerator = Mock(trackers=[])
    for folder in ("first/run", "second/run", "first/run"):
        start_trackers(accelerator, tmp_path / folder, ARGS, 0)
    tables = [call.kwargs["init_kwargs"]["wandb"] for call in accelerator.init_trackers.call_args_list]
    assert [table["name"] for table in tables] == ["run"] * 3
    assert tables[0]["id"] == tables[2]["id"] != tables[1]["id"]


def test_names_cannot_move_the_cursor_or_reverse_text():
    scores = {
        "accuracy": 0.5,
        "worst_accuracy": 0.5,
        "f1_macro": 0.5,
        "worst_group": "\x9b0m",
        "num_samples": {"\x07": 1},
    }
    table = domain_table(make_record(roles={"ood": scores}), ["\x1b[31mred", "\u202egnp.exe", "a\nb"])
    assert len(table.splitlines()) == 7
    assert all(name in table for name in (r"\x1b[31mred", r"\u202egnp.exe", r"a\nb", r"\x9b0m", r"\x07 1"))
    assert all(character.isprintable() for character in table.replace("\n", ""))


def test_a_disk_error_of_a_tracker_is_a_warning(caplog):
    with tracker_errors_logged():
        raise OSError(5, "Input/output error")
    assert "the trackers cannot write ([Errno 5] Input/output error); the run goes on" in caplog.text
