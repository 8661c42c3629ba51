"""Launch settings that did not take effect are refused, and a process that is lost is explained."""

import os
import signal
import socket
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.utils import DistributedType
from torch import distributed

from timm_moe_dg.errors import ArgumentError, CheckpointError, MoeDgError
from timm_moe_dg.finetuning import launch
from timm_moe_dg.finetuning.launch import (
    check_distribution,
    check_plugins,
    check_precision,
    check_world_size,
    lost_process_explained,
    threads_given,
)
from timm_moe_dg.protocols.options import RunOptions

TIMEOUT = 0.05  # minutes
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, 1),
        (ACCELERATE, 1),
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2),
        ({"WORLD_SIZE": "1"}, 1),
        ({"MASTER_ADDR": "node1"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
    ],
)
def test_as_asked(environment, processes):
    check_world_size(environment, processes)


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1),
        ({"ACCELERATE_NUM_PROCESSES": "2"}, 1),
        ({"PMI_SIZE": "4"}, 1),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1),
    ],
    ids=["two strangers", "accelerate variable", "mpi", "--cpu --num_processes 2"],
)
def test_not_as_asked(environment, processes):
    with pytest.raises(ArgumentError, match=r"num_processes=.*ACCELERATE_USE_CPU=true"):
        check_world_size(environment, processes)


def test_threads_that_the_user_set_are_told_from_the_launcher_s(monkeypatch):
    given, launched = {"OMP_NUM_THREADS": "1"}, {**ACCELERATE, "OMP_NUM_THREADS": "1"}
    assert threads_given(given)
    assert not threads_given({})
    for parent, expected in (({}, False), (given, True)):
        launcher = SimpleNamespace(environ=lambda parent=parent: parent)
        monkeypatch.setattr(psutil, "Process", lambda launcher=launcher: SimpleNamespace(parent=lambda: launcher))
        assert threads_given(launched) == expected
        assert threads_given({**launched, "OMP_NUM_THREADS": "3"})  # --num_cpu_threads_per_process 3
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: None))  # it has ended
    assert not threads_given(launched)


@pytest.mark.parametrize(("given", "threads"), [({"OMP_NUM_THREADS": "3"}, None), ({}, 5)])
def test_threads_are_the_user_s_or_a_share_of_the_cores(monkeypatch, given, threads):
    for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(launch, "available_cpus", lambda: 5)
    for wanted in (None, 2):
        launch.join_processes(RunOptions(cpu_threads=wanted))
    assert counts == [*([threads] if threads else []), 2]


def test_half_precision_that_would_silently_be_full():
    check_precision("fp16", "cuda")
    check_precision("bf16", "cpu")
    with pytest.raises(ArgumentError, match=r"amp_dtype='float16'.*bfloat16"):
        check_precision("fp16", "cpu")


@pytest.mark.parametrize(
    ("cpu_alone", "supported", "precision"), [("false", True, "bf16"), ("false", False, "no"), ("true", True, "no")]
)
def test_auto_is_bfloat16_on_gpus_that_have_it(monkeypatch, cpu_alone, supported, precision):
    monkeypatch.setenv("ACCELERATE_USE_CPU", cpu_alone)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: supported)
    assert launch.wanted_precision("auto") == precision
    assert launch.wanted_precision("float16") == "fp16"
    assert launch.wanted_precision(None) is None


@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_is_refused_on_gpus_that_lack_it(supported, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: supported)
    with nullcontext() if supported else pytest.raises(ArgumentError, match="amp_dtype='bfloat16': this GPU has no"):
        check_precision("bf16", "cuda")


def test_sharded_networks_and_divided_losses_are_refused():
    for kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        check_distribution(kind, 1)
    with pytest.raises(ArgumentError, match=r"distributed_type='.*DEEPSPEED': .* launch without it"):
        check_distribution(DistributedType.DEEPSPEED, 1)
    with pytest.raises(ArgumentError, match=r"gradient_accumulation_steps=4: .*--grad-accum-steps"):
        check_distribution(DistributedType.NO, 4)


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM"])
def test_a_plugin_that_would_be_left_out_in_silence_is_refused(name):
    check_plugins({f"ACCELERATE_USE_{name}": "false", "ACCELERATE_USE_CPU": "true"})
    with pytest.raises(ArgumentError, match=rf"distributed_type='{name}': .* launch without it \(--use_deepspeed"):
        check_plugins({f"ACCELERATE_USE_{name}": "true"})


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
