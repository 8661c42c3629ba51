"""What a run shows: means since the last evaluation, the table, and what trackers get."""

import errno
import math
import sys
import threading
from dataclasses import replace
from importlib import util
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.invented import make_record
from timm_moe_dg.errors import ArgumentError, MissingDependencyError
from timm_moe_dg.finetuning import progress
from timm_moe_dg.finetuning.progress import StepMeter, domain_table, start_trackers, tracker_errors_logged
from timm_moe_dg.finetuning.run import FineTuning

ARGS = {"model_kwargs": {"moe_layers": (8, 10)}, "test_domains": [1], "lr": 0.1}


def test_meter_means_and_forgets():
    meter = StepMeter()
    for value in (1.0, 2.0, 6.0):
        meter.add({"loss": torch.tensor(value), "aux_loss": torch.tensor(2 * value)})
    means, seconds = meter.take()
    assert {name: value.item() for name, value in means.items()} == {"loss": 3.0, "aux_loss": 6.0}
    assert seconds > 0
    meter.restart()
    meter.add({"loss": torch.tensor(5.0)})
    assert meter.take()[0] == {"loss": torch.tensor(5.0)}


def test_table_has_a_row_for_each_domain_and_marks_the_test_domain():
    table = domain_table(make_record(), ["art", "cartoon", "photo"])
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["art"] == ["train", "0.9000", "0.6000"]
    assert rows["cartoon"] == ["test", "0.8000", "0.5000"]
    assert rows["photo"] == ["train", "0.7000", "0.4000"]
    assert "step 300" in table
    assert "task_loss 0.2500" in table
    assert "(mean of out acc) 0.5000; the accuracy on the held-out in-split 0.8000" in table
    record = make_record()
    table = domain_table(replace(record, args={**record.args, "test_envs": []}), ["art", "cartoon", "photo"])
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


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None if name == "wandb" else util.find_spec(name))
    with pytest.raises(MissingDependencyError, match=r"--log-wandb needs wandb.*timm_moe_dg\[tracking\]"):
        progress.check_trackers(["tensorboard", "wandb"])


def test_a_pipe_gets_a_line_a_minute_and_one_at_the_end(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    bar = progress.StepBar(range(4, 10), "net")
    for step in bar:
        clock[0] += 25
        bar.show(step, loss=0.5, rate=8.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "net: 7/10 steps, loss 0.5000, 8 images/s, about 75 s left",
        "net: 10/10 steps, loss 0.5000, 8 images/s, about 0 s left",
        "net: 10/10 steps",
    ]
    for _ in progress.StepBar(range(2), "net", hidden=True):
        pass
    assert capsys.readouterr().err == ""


def test_weights_and_biases_without_a_key_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(api=SimpleNamespace(api_key=None)))
    monkeypatch.setattr(progress, "find_spec", lambda name: True)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ArgumentError, match=r"^log_wandb=True: Weights & Biases has no key; set WANDB_API_KEY"):
        progress.check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    progress.check_trackers(["wandb"])


def test_splits_without_images_have_no_number():
    record = replace(make_record(), out_acc=(0.6, math.nan, 0.4))
    table = domain_table(record, ["art", "cartoon", "photo"])
    assert [line.split()[2:] for line in table.splitlines() if "cartoon" in line] == [["0.8000", "-"]]


def test_validation_on_held_out_groups_is_labeled_oracle_in_the_log():
    scores = {"accuracy": 0.5, "worst_accuracy": 0.5, "f1_macro": 0.5, "worst_group": "b", "num_samples": {"b": 1}}
    facts = [["train", "a", "official"], ["ood", "b", "official"], ["train", "c", "official"]]
    args = {**make_record().args, "domain_facts": facts, "split_sizes": [[3, 1]] * 3}
    record = replace(make_record(roles={"ood": scores, "ood_val": scores}), args=args)
    lines = domain_table(record, ["a", "b", "c"]).splitlines()
    assert [line.strip().partition(":")[0] for line in lines[5:7]] == ["ood", "ood_val (held-out groups"]
    assert "oracle): accuracy 0.5000" in lines[6]
    facts[0][1] = "b"
    assert "oracle" not in domain_table(record, ["a", "b", "c"])


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


def test_a_disk_error_of_a_tracker_is_a_warning(tmp_path, caplog):
    def fail(row, step):
        raise OSError(5, "Input/output error")

    added = []
    accelerator = SimpleNamespace(is_main_process=True, trackers=["tensorboard"], log=fail)
    folder = SimpleNamespace(path=tmp_path, args={}, add=lambda record, save: added.append(record))
    run = SimpleNamespace(
        plan=SimpleNamespace(folder=folder, names=list("abc")),
        accelerator=accelerator,
        model=SimpleNamespace(sharding=None, save=print),
    )
    FineTuning._record_evaluation(run, make_record(), None)
    assert len(added) == 1
    assert "the trackers cannot write ([Errno 5] Input/output error); the run goes on" in caplog.text


def test_a_full_disk_is_a_warning_without_the_traceback_of_tensorboard_s_thread(tmp_path, monkeypatch, capfd, caplog):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    accelerator = Accelerator(cpu=True, log_with=["tensorboard"], project_dir=tmp_path)
    start_trackers(accelerator, tmp_path, ARGS, 0)
    (tracker,) = accelerator.trackers
    writer = tracker.writer.file_writer.event_writer._async_writer
    monkeypatch.setattr(writer._worker._record_writer, "write", fail)
    for step in range(2):
        with tracker_errors_logged():
            accelerator.log({"loss": 1.0}, step=step)
            tracker.writer.flush()
    assert "the trackers cannot write ([Errno 28] No space left" in caplog.text
    assert "Traceback" not in capfd.readouterr().err
