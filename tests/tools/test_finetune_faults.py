"""Two runs of one name, folders that vanish, damaged files, weights that overflow: one line, never a wrong `done`."""

import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.load_tool import load_tool
from tests.quick_python import run_ranks
from tests.tools.test_finetune_resume import during_step
from timm_moe_dg.algorithms import Algorithm
from timm_moe_dg.storage.files import owned

pytestmark = pytest.mark.slow  # whole runs

SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2", "patch_size=8"]
RUN = ["--model", "gmoe_tiny_patch16", *SIZE, "--eval-freq", "2", "-b", "2", "--cpu-threads", "1", "--workers", "0"]
SWEEP = ["--datasets", "rotated_digits", "--trial-seeds", "0", "--domains", "0"]
TRAIN = [*RUN, "--lr", "0.001", "--steps", "5"]


@pytest.fixture
def tool():
    return load_tool("finetune")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 5 steps, evaluated after 0, 2 and 4, which keeps its last checkpoint."""
    output = tmp_path_factory.mktemp("finished")
    load_tool("finetune").main([*TRAIN, "--output", str(output), "--experiment", "a"])
    return output / "a"


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "a")


def refused(tool, *words):
    with pytest.raises(SystemExit) as caught:
        tool.main([str(word) for word in words])
    assert isinstance(caught.value.code, str)
    assert "\n" not in caught.value.code
    return caught.value.code


def test_a_folder_that_vanishes_under_a_run_ends_it_in_one_line(tool, tmp_path):
    with during_step(3, partial(shutil.rmtree, tmp_path / "a")):
        line = refused(tool, *TRAIN, "--output", tmp_path, "--experiment", "a")
    assert re.search(r"StorageError: output='.*a/checkpoints/.*': cannot be written .*No such file", line)
    assert not (tmp_path / "a").exists()


def test_full_memory_is_answered_with_options_that_take_less(tool, tmp_path, monkeypatch):
    def limited(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Algorithm, "forward_domains", limited)
    line = refused(tool, *TRAIN, "--output", tmp_path, "--experiment", "a")
    assert re.search(r"ArgumentError: batch_size=2: .* --grad-accum-steps .*\(CUDA out of memory", line)


def test_checkpoints_that_a_kill_after_done_has_left_are_removed(tool, tmp_path, capsys):
    words = [*TRAIN, "--sched", "cosine", "--output", str(tmp_path), "--experiment", "a", "--resume", "auto"]
    tool.main(words)
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "step-000004.pt").touch()
    tool.main(words)
    assert "is finished: nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "a" / "checkpoints").exists()


DAMAGED = [b"\xff\xfe\x00binary", b"", b"[" * 20_000, b"format: 99"]


@pytest.mark.parametrize("content", DAMAGED, ids=["no text", "empty", "deep", "other format"])
def test_a_damaged_args_yaml_is_named_by_its_file(run, content):
    (run / "args.yaml").write_bytes(content)
    sweep = load_tool("sweep")
    args = sweep.build_parser().parse_args([*SWEEP, "--output", str(run.parent)])
    (planned,) = sweep.plan_runs(sweep.read_sweep(args))
    shutil.copytree(run, run.parent / planned.name)
    for user, words in (
        ("finetune", ["--resume", run]),
        ("evaluate", ["--model", f"local-dir:{run / 'best'}"]),
        ("sweep", ["--status", *SWEEP, "--output", run.parent]),
    ):
        assert "args.yaml': " in refused(load_tool(user), *words)


def two_processes(rank, output, port):
    os.environ |= {"ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(SystemExit) as caught:
        load_tool("finetune").main([*TRAIN, "--output", output, "--experiment", "a"])
    Path(output, f"ended{rank}").write_text(str(caught.value.code))


def test_of_two_processes_the_main_one_says_that_the_folder_is_taken_and_both_end(tmp_path, fresh_python):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with owned(tmp_path / "a"):
        run_ranks(fresh_python, two_processes, str(tmp_path), port)
    assert "is in use by process" in (tmp_path / "ended0").read_text()
    assert "ProcessLostError: the main process did not start the run" in (tmp_path / "ended1").read_text()
    assert not (tmp_path / "a").exists()
