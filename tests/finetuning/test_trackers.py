"""Trackers write into the run folder, and a missing package is named."""

from importlib import util

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from timm_moe_dg.errors import MissingDependencyError
from timm_moe_dg.finetuning import progress
from timm_moe_dg.finetuning.progress import Trackers

ARGS = {"model_kwargs": {"moe_layers": (8, 10)}, "test_domains": [1], "lr": 0.1}


def logged(folder):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("validation_acc")]


def test_a_resumed_run_goes_on_where_it_went_on(tmp_path):
    first = Trackers(["tensorboard"], tmp_path, ARGS)
    assert list(tmp_path.iterdir()) == []
    for step in (0, 4, 8):
        first.log({"validation_acc": step / 16}, step)
    first.finish()
    second = Trackers(["tensorboard"], tmp_path, ARGS, first_step=5)
    second.log({"validation_acc": 0.75}, 8)
    second.finish()
    assert logged(tmp_path) == [(0, 0.0), (4, 0.25), (8, 0.75)]


def test_a_missing_package_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "find_spec", lambda name: None if name == "wandb" else util.find_spec(name))
    with pytest.raises(MissingDependencyError, match=r"--log-wandb needs wandb.*timm_moe_dg\[tracking\]"):
        Trackers(["tensorboard", "wandb"], tmp_path, ARGS)
