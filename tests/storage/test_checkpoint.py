"""Checkpoints: every bit comes back, damage is noticed, and the one before is used."""

import errno
import math
import os

import numpy as np
import pytest
import torch
from torch import nn

from timm_moe_dg.errors import CheckpointError, StorageError
from timm_moe_dg.storage.checkpoint import Checkpoints, TrainingState, read_checkpoint


def nested(seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(3, 4)
    return {
        "step": 7,
        "state": {
            0: {"exp_avg": weight, "step": torch.tensor(3.0)},
            1: {"exp_avg": weight, "empty": torch.zeros(0, 2)},
        },
        "param_groups": [{"betas": (0.9, 0.999), "lr": 1e-4, "fused": None, "params": [0, 1]}],
        "transposed": weight.t(),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": weight.to(torch.bfloat16),
        "a.b": torch.tensor([True]),
        "a": {"b": torch.tensor(5), "text": "x", "limit": math.inf},
    }


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        for item, other in zip(actual, expected, strict=True):
            assert_same(item, other)
    else:
        assert actual == expected


def test_nested_states_come_back_bit_for_bit(tmp_path):
    path = Checkpoints(tmp_path).save(7, nested())
    assert_same(read_checkpoint(path), nested())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000007.pt", "step-000007.pt.sha256"]


def test_the_last_two_are_kept_in_order_of_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    (tmp_path / "step-copy.pt").touch()
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.save(step, {"step": step})
    names = ["step-1000000.pt", "step-1000000.pt.sha256", "step-1000001.pt", "step-1000001.pt.sha256", "step-copy.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert checkpoints.newest() == {"step": 1_000_001}


@pytest.mark.parametrize("file", ["step-000002.pt", "step-000002.pt.sha256"])
@pytest.mark.parametrize("damage", ["removed", "cut off", "one bit", "not text"])
def test_damage_is_reported_and_the_one_before_used(tmp_path, caplog, file, damage):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, nested(step))
    data = bytearray((tmp_path / file).read_bytes())
    (tmp_path / file).unlink()
    if damage == "one bit":
        data[len(data) // 2] ^= 1
    content = {"cut off": data[: len(data) // 2], "one bit": data, "not text": b"\xff"}
    if damage in content:
        (tmp_path / file).write_bytes(content[damage])
    assert_same(checkpoints.newest(), nested(1))
    # A checkpoint that is gone altogether cannot be missed
    if (file, damage) != ("step-000002.pt", "removed"):
        assert "step-000002.pt': is damaged (" in caplog.text
        assert "using the checkpoint before it" in caplog.text


def test_a_full_disk_leaves_those_before_intact(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, nested(step))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(content, file):
        file.write(b"half")
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598")  # noqa: B904 (as torch's writer does)

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(StorageError, match=r"step-000003.pt': cannot be written .*No space left.*free some space"):
        checkpoints.save(3, nested(3))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"new.pt': cannot be read back .*scalar.* a state may hold tensors"):
        Checkpoints(tmp_path).save(1, {"algorithm": {"rate": np.float64(0.5)}})
    assert Checkpoints(tmp_path).newest() is None
    assert not list(tmp_path.iterdir())


def test_a_run_folder_that_was_removed_does_not_come_back(tmp_path):
    with pytest.raises(StorageError, match="No such file"):
        Checkpoints(tmp_path / "removed" / "checkpoints").save(1, {})
    assert not list(tmp_path.iterdir())


def test_each_process_gets_its_own_part_back():
    def state(process, gather=list):
        torch.manual_seed(process)
        shared = nn.Linear(2, 2)
        algorithm = nn.Linear(2, 2)
        return TrainingState({"network": shared}, {"algorithm": algorithm}, gather, process), shared, algorithm

    first, shared, first_algorithm = state(0)
    second, _, second_algorithm = state(1)
    saved = first.collect()
    saved["per_process"] = [{"algorithm": state.per_process["algorithm"].state_dict()} for state in (first, second)]
    again, new_shared, new_algorithm = state(1)
    nn.init.zeros_(new_algorithm.weight)
    again.restore(saved)
    assert torch.equal(new_algorithm.weight, second_algorithm.weight)
    assert torch.equal(new_shared.weight, shared.weight)
    assert not torch.equal(new_algorithm.weight, first_algorithm.weight)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(path, missing_ok=False):
        if path.name != ".new.pt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(type(tmp_path), "unlink", refuse)
    for step in (1, 2, 3):
        Checkpoints(tmp_path).save(step, {"step": step})
    assert "step-000001.pt': cannot be deleted (Input/output error); delete it by hand" in caplog.text
    assert Checkpoints(tmp_path).newest() == {"step": 3}
