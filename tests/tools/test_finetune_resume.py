"""Runs that end early go on as if nothing had happened; runs that cannot go on say why."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial

import pytest
import yaml
from accelerate.state import AcceleratorState

from tests.load_tool import TOOLS, run_tool
from tests.quick_python import run_ranks
from tests.saved_run import outcome
from timm_moe_dg.finetuning import loop
from timm_moe_dg.finetuning import run as running
from timm_moe_dg.networks.calibration import CALIBRATION
from timm_moe_dg.storage.run_folder import Checkpoints

pytestmark = pytest.mark.slow  # whole runs, programs and processes

MODEL = ["--model", "gmoe_tiny_patch16", "--model-kwargs", "embed_dim=48", "depth=3", "num_heads=3", "moe_layers=(1,)"]
RANDOM = ["num_experts=3", "drop_rate=0.1", "expert_drop=0.1", "--drop-path", "0.2", "--workers", "1"]
STEPS = ["--steps", "9", "--checkpoint-freq", "4", "--save-freq", "3", "--batch-size", "4", "--grad-accum-steps", "2"]
RUN = [*MODEL, *RANDOM, *STEPS, "--lr", "0.001", "--sched", "cosine", "--averaging", "ema", "--cpu-threads", "1"]
RUN += ["--save-rules", "oracle"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was left alone."""
    output = tmp_path_factory.mktemp("whole")
    run_tool("finetune", *RUN, "--output", output, "--experiment", "a")
    return output / "a"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same run, told to end while step 5 is taken."""
    output = tmp_path_factory.mktemp("stopped")
    with during_step(5, partial(os.kill, os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit) as caught:
        run_tool("finetune", *RUN, "--output", output, "--experiment", "a")
    assert caught.value.code == 143
    return output / "a"


@pytest.fixture
def unfinished(stopped, tmp_path):
    """A copy of it."""
    return shutil.copytree(stopped, tmp_path / "runs" / "a")


@contextmanager
def during_step(step, action):
    """Does something when a step's seed is set; the run's own seed is set before all steps'."""
    seeds, original = iter(range(-1, 1000)), loop.set_seed

    def set_seed(seed):
        original(seed)
        if next(seeds) == step:
            action()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "set_seed", set_seed)
        yield


def test_a_step_that_runs_at_sigterm_is_saved_and_the_resumed_run_is_the_uninterrupted_one(whole, unfinished, capfd):
    saved = sorted(path.name for path in (unfinished / "checkpoints").iterdir())
    assert saved == ["step-000004.pt", "step-000005.pt"]
    assert len((unfinished / "results.jsonl").read_text().splitlines()) == 2
    assert not (unfinished / "done").exists()
    run_tool("finetune", "--resume", unfinished, "--workers", 0)
    assert outcome(unfinished) == outcome(whole)
    assert f"resumed {unfinished} after step 5" in capfd.readouterr().out
    assert not (unfinished / "checkpoints").exists()
    before = {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")}
    run_tool("finetune", *RUN, "--output", unfinished.parent, "--experiment", "a", "--resume")
    assert "is finished: nothing to do" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")} == before


def test_a_run_that_ends_while_it_is_calibrated_is_completed(whole, unfinished):
    original, calibrations = running.calibrate, []

    def interrupted(*args, **keywords):
        calibrations.append(args)
        if len(calibrations) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "calibrate", interrupted)
        for _ in range(2):
            assert not (unfinished / "done").exists()
            assert not (unfinished / "best" / CALIBRATION).exists()
            with nullcontext() if calibrations else pytest.raises(SystemExit, match="143"):
                run_tool("finetune", "--resume", unfinished, "--workers", 0)
    assert (unfinished / "done").exists()
    assert len(calibrations) == 2
    assert (unfinished / "best" / CALIBRATION).read_bytes() == (whole / "best" / CALIBRATION).read_bytes()


@pytest.mark.parametrize("file", ["args.yaml", "checkpoints/step-000005.pt"])
def test_a_run_of_an_earlier_version_is_refused_in_one_line_and_not_touched(unfinished, monkeypatch, file):
    if file == "args.yaml":
        args = yaml.safe_load((unfinished / file).read_text())
        (unfinished / file).write_text(yaml.safe_dump({**args, "format": 1}))
    else:
        checkpoints = Checkpoints(unfinished / "checkpoints")
        state = checkpoints.newest()
        monkeypatch.setattr("timm_moe_dg.protocols.run_identity.FORMAT", 1)
        checkpoints.save(5, state)
        monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")}
    said = "has format 1, written by timm_moe_dg 0.1.0, and this version reads format 3 alone; use the version that .*"
    with pytest.raises(SystemExit, match=rf"^finetune.py: FormatError: \w+='.*{file}': {said}$"):
        run_tool("finetune", "--resume", unfinished)
    assert {path: path.stat().st_mtime_ns for path in unfinished.rglob("*")} == before


def two_processes(rank, output, ports):
    """One of two processes: a run that is left alone, one of which the second process is told to end, and its rest."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    words = [*RUN, "--steps", "4", "--checkpoint-freq", "3", "--workers", "0", "--output", output, "--experiment"]
    for port, name in zip(ports, ("whole", "stopped", "resumed"), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        AcceleratorState._reset_state(reset_partial_state=True)
        terminated = during_step(1, partial(os.kill, os.getpid(), signal.SIGTERM))
        with (
            terminated if name == "stopped" and rank == 1 else nullcontext(),
            pytest.raises(SystemExit) if name == "stopped" else nullcontext(),
        ):
            run_tool("finetune", *words, *(("stopped", "--resume") if name == "resumed" else (name,)))


def test_two_processes_stop_together_and_go_on_bit_for_bit(tmp_path, fresh_python):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for free in sockets:
            free.bind(("localhost", 0))
        ports = [free.getsockname()[1] for free in sockets]
    run_ranks(fresh_python, two_processes, str(tmp_path), ports)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


def test_a_run_that_is_killed_can_be_resumed_at_once_and_not_before(whole, tmp_path):
    """The lock ends with the process, though forked workers may live for seconds more."""
    words = [*RUN, "--output", str(tmp_path), "--experiment", "a"]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOLS / "finetune.py"), *words]
    with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        while not list(tmp_path.glob("a/checkpoints/*.pt")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(SystemExit, match=f"a': is in use by process {process.pid} on"):
            run_tool("finetune", *words, "--resume", "auto")
        process.kill()
        process.wait()
        run_tool("finetune", *words, "--resume", "auto")
        with suppress(ProcessLookupError):  # the workers have ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
    assert outcome(tmp_path / "a") == outcome(whole)
