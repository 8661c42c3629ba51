"""Processes that go away, one at a time, under those that wait for them."""

import logging
import os
import signal
import socket
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import distributed

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning import PeerWatch

pytestmark = pytest.mark.slow  # processes

STEP = 20  # in which something happens


def happen(rank, how):
    """What goes wrong, on the second process unless it is of both."""
    if how == "broken":
        raise RuntimeError("of both")
    if rank == 1 and how == "own error":
        raise ArgumentError("lr=7: too high")
    if rank == 1 and how in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), signal.Signals[how])
    if rank == 0 and how == "SIGSTOP":
        distributed.recv(torch.zeros(1), 1)  # for as long as the library waits, half an hour


def process(rank, port, how, said):
    """One of two that meet at every step."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(format="%(message)s", stream=os.fdopen(2, "w"), force=True)
    sys.argv = ["finetune.py"]
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        with PeerWatch(2, silence=4.0):
            for step in range(STEP + 10):
                distributed.all_reduce(torch.zeros(1))
                if step == STEP:
                    happen(rank, how)
                time.sleep(0.02)
            if rank == 0 and how == "late":
                time.sleep(3)
    except (ArgumentError, RuntimeError) as error:
        os.write(2, f"own: {error}\n".encode())
        os._exit(1)
    os._exit(0)


def two(how, folder: Path):
    """Statuses of two processes, and what they said on standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / "first", folder / "second"]
    context = get_context("fork")
    started = [context.Process(target=process, args=(rank, port, how, files[rank])) for rank in range(2)]
    for one in started:
        one.start()
    started[0].join(120)
    if how == "SIGSTOP":
        started[1].kill()
    started[1].join(60)
    return [one.exitcode for one in started], [file.read_text() for file in files]


LOST = "finetune.py: num_processes=2: another one of them was killed, failed or has not answered for 4 s; "


def test_a_process_that_is_killed_ends_the_other_with_one_line(tmp_path):
    statuses, (said, _) = two("SIGKILL", tmp_path)
    assert statuses == [1, -signal.SIGKILL]
    assert said.startswith(LOST)
    assert said.count("\n") == 1


def test_a_process_that_falls_silent_ends_the_other_although_it_waits_for_good(tmp_path):
    statuses, (said, _) = two("SIGSTOP", tmp_path)
    assert statuses[0] == 1
    assert said.startswith(LOST)
    assert said.count("\n") == 1


def test_a_mistake_of_one_is_its_own_line_and_the_other_says_that_it_is_alone(tmp_path):
    statuses, (first, second) = two("own error", tmp_path)
    assert statuses == [1, 1]
    assert second == "own: lr=7: too high\n"
    assert first.startswith(LOST)


def test_what_all_run_into_is_said(tmp_path):
    statuses, said = two("broken", tmp_path)
    assert statuses == [1, 1]
    assert all("of both" in line for line in said)


@pytest.mark.parametrize("how", ["nothing", "late"])
def test_processes_that_end_by_themselves_are_no_loss(how, tmp_path):
    assert two(how, tmp_path) == ([0, 0], ["", ""])


def test_one_process_has_nobody_to_watch():
    with pytest.raises(RuntimeError, match="its own"), PeerWatch(1):
        raise RuntimeError("its own")
