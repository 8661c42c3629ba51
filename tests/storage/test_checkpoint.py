"""Checkpoints: every bit comes back, damage is noticed, and the one before is there."""

import errno
import json
import math
import os

import pytest
import torch
from torch import nn

from timm_moe_dg.errors import CheckpointError, StorageError
from timm_moe_dg.storage import checkpoint as module
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
        "half": weight.to(torch.bfloat16),
        "a.b": torch.tensor([True]),
        "a": {"b": torch.tensor(5), "text": "x", "limit": math.inf},
    }


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def test_nested_states_come_back_bit_for_bit(tmp_path):
    path = Checkpoints(tmp_path).save(7, nested())
    assert_same(read_checkpoint(path), nested())
    assert not [file for file in path.iterdir() if file.suffix not in (".json", ".safetensors")]


def test_the_last_two_are_kept_in_order_of_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.save(step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1000000", "step-1000001"]
    assert checkpoints.newest() == {"step": 1_000_001}


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["removed", "cut off", "one bit"])
def test_damage_is_reported_and_the_one_before_taken(tmp_path, caplog, file, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, nested(1))
    path = checkpoints.save(2, nested(2)) / file
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "one bit":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert_same(checkpoints.newest(), nested(1))
    assert "step-000002': is damaged" in caplog.text
    assert "taking the one before" in caplog.text


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"state.json": 5}', "[" * 100_000, "listed"])
def test_checksums_that_vouch_for_too_little_are_damage(tmp_path, caplog, text):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, nested(1))
    path = checkpoints.save(2, nested(2)) / "checksums.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({"state.json": table["state.json"]}) if text == "listed" else text)
    assert_same(checkpoints.newest(), nested(1))
    assert "step-000002': is damaged (checksums.json" in caplog.text
    assert checkpoints.at(2) is None
    assert_same(checkpoints.at(1), nested(1))


def test_a_full_disk_leaves_those_before_intact(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, nested(step))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def refuse(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(module, "save_file", refuse)
    with pytest.raises(StorageError, match=r"step-000003': cannot be written .*No space left.*free some space"):
        checkpoints.save(3, nested(3))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.algorithm\.queue=.*: a set cannot be kept"):
        Checkpoints(tmp_path).save(1, {"algorithm": {"queue": {1, 2}}})
    assert Checkpoints(tmp_path).newest() is None


def test_each_process_gets_its_own_part_back():
    def state(process, gather=list):
        torch.manual_seed(process)
        shared = nn.Linear(2, 2)
        own = nn.Linear(2, 2)
        return TrainingState({"network": shared}, {"algorithm": own}, gather, process), shared, own

    first, shared, own = state(0)
    second, _, other = state(1)
    both = first.own, second.own
    kept = first.collect()
    kept["own"] = [{"algorithm": parts["algorithm"].state_dict()} for parts in both]
    again, new_shared, new_own = state(1)
    nn.init.zeros_(new_own.weight)
    again.restore(kept)
    assert torch.equal(new_own.weight, other.weight)
    assert torch.equal(new_shared.weight, shared.weight)
    assert not torch.equal(new_own.weight, own.weight)
