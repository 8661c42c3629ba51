"""Launch settings that did not take effect are refused, a lost process is explained, and signals end all processes."""

import os
import signal
import socket
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import distributed

from timm_moe_dg.errors import ArgumentError, CheckpointError, MoeDgError
from timm_moe_dg.finetuning import processes
from timm_moe_dg.finetuning.processes import (
    Interrupted,
    Interruption,
    check_launch,
    check_world_size,
    lost_process_explained,
    threads_given,
)
from timm_moe_dg.protocols.options import RunOptions

TIMEOUT = 0.05  # minutes
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("environment", "processes", "as_asked"),
    [
        ({}, 1, True),
        (ACCELERATE, 1, True),
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2, True),
        ({"WORLD_SIZE": "1"}, 1, True),
        ({"MASTER_ADDR": "node1"}, 1, True),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4, True),
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1, False),  # two strangers
        ({"ACCELERATE_NUM_PROCESSES": "2"}, 1, False),
        ({"PMI_SIZE": "4"}, 1, False),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1, False),  # --cpu --num_processes 2
    ],
)
def test_a_world_of_another_size_than_was_asked_for_is_refused(environment, processes, as_asked):
    with nullcontext() if as_asked else pytest.raises(ArgumentError, match=r"num_processes=.*USE_CPU=true"):
        check_world_size(environment, processes)


def test_threads_that_the_user_set_are_told_from_the_launcher_s():
    given, launched = {"OMP_NUM_THREADS": "1"}, {**ACCELERATE, "OMP_NUM_THREADS": "1"}
    assert [threads_given(variables) for variables in ({}, given, launched)] == [False, True, False]
    assert threads_given({**launched, "OMP_NUM_THREADS": "3"})  # --num_cpu_threads_per_process 3


@pytest.mark.parametrize(("given", "threads"), [({"OMP_NUM_THREADS": "3"}, None), ({}, 5)])
def test_threads_are_the_user_s_or_a_share_of_the_cores(monkeypatch, given, threads):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(processes, "available_cpus", lambda: 5)
    for wanted in (None, 2):
        processes.join_processes(RunOptions(cpu_threads=wanted))
    assert counts == [*([threads] if threads else []), 2]


@pytest.mark.parametrize(
    ("cpu_alone", "supported", "precision"), [("false", True, "bf16"), ("false", False, "no"), ("true", True, "no")]
)
def test_auto_is_bfloat16_on_gpus_that_have_it(monkeypatch, cpu_alone, supported, precision):
    monkeypatch.setenv("ACCELERATE_USE_CPU", cpu_alone)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: supported)
    assert processes.wanted_precision("auto") == precision
    assert processes.wanted_precision("float16") == "fp16"
    assert processes.wanted_precision(None) is None


@pytest.mark.parametrize(
    ("argument", "options", "launched", "environment"),
    [
        ("distributed_type", {}, {"distributed_type": DistributedType.DEEPSPEED}, {}),
        ("gradient_accumulation_steps", {}, {"gradient_accumulation_steps": 4}, {}),
        ("distributed_type", {}, {}, {"ACCELERATE_USE_DEEPSPEED": "true"}),
        ("distributed_type", {}, {}, {"ACCELERATE_USE_MEGATRON_LM": "true"}),
        ("amp_dtype", {}, {"mixed_precision": "fp16"}, {}),
        ("amp_dtype", {}, {"mixed_precision": "bf16", "device": torch.device("cuda")}, {}),  # an old GPU
        ("distributed_type", {}, {}, {"ACCELERATE_USE_FSDP": "true"}),
    ],
)
def test_launches_that_accelerate_or_the_run_would_change_are_refused(
    argument, options, launched, environment, monkeypatch
):
    usual = {"distributed_type": DistributedType.MULTI_CPU, "gradient_accumulation_steps": 1, "num_processes": 2}
    usual |= {"mixed_precision": "bf16", "device": torch.device("cpu")}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=f"^{argument}="):
        check_launch(RunOptions(**options), SimpleNamespace(**{**usual, **launched}))
    for name in environment:
        monkeypatch.delenv(name)
    check_launch(RunOptions(), SimpleNamespace(**usual))


def meet(rank, port, how, answers):
    """One of two processes that meet at every step, until something goes wrong in the second."""
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=60 * TIMEOUT)
    )
    try:
        with lost_process_explained(RunOptions(process_timeout=TIMEOUT), SimpleNamespace(num_processes=2)):
            for step in range(20):
                distributed.all_reduce(torch.zeros(1))
                if step == 9 and rank == 1:
                    how(rank)
    except MoeDgError as error:
        answers[rank] = f"{type(error).__name__}: {error}"
    os._exit(0)


def fail(rank):
    raise ArgumentError("lr=7: too high")


def end_by(number):
    return lambda rank: os.kill(os.getpid(), number)


@pytest.mark.slow
@pytest.mark.parametrize("how", [end_by(signal.SIGKILL), end_by(signal.SIGSTOP), fail], ids=["kill", "stop", "fail"])
def test_a_process_that_is_lost_ends_the_other_with_one_line(how):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    with context.Manager() as manager:
        answers = manager.dict()
        processes = [context.Process(target=meet, args=(rank, port, how, answers)) for rank in range(2)]
        for process in processes:
            process.start()
        processes[0].join(60)
        processes[1].kill()
        said = answers[0]
        assert answers.get(1) in (None, "ArgumentError: lr=7: too high")
    assert said.startswith(
        "ProcessLostError: num_processes=2: another process ended, or did not answer for 0.05 min (--process-timeout)"
    )
    assert "start all processes again with --resume (" in said
    assert "\n" not in said


def test_other_errors_are_left_alone():
    processes = SimpleNamespace(num_processes=2)
    for error in (RuntimeError("shape mismatch"), CheckpointError("damaged")):
        with pytest.raises(type(error), match=str(error)), lost_process_explained(RunOptions(), processes):
            raise error


def test_the_signal_is_noted_and_the_handler_before_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as stop:
        assert not stop.should_stop()
        assert list(stop.until_stopped([1, 2])) == [1, 2]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.should_stop()
        assert stop.error("").exit_code == 143
        with pytest.raises(Interrupted):
            list(stop.until_stopped([1, 2]))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal; a suite that a script started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_noted_once_and_then_ends_at_once(ctrl_c):
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.should_stop()
        assert stop.error("").exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
