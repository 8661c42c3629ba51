"""Processes that go away, one at a time, under those that wait for them."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.load_tool import TOOLS

pytestmark = pytest.mark.slow  # processes

NAME = "-c"  # of a program that is given so
# Two processes that meet at every step; the second ends as it is told to
SCRIPT = """
import logging, os, signal, sys, time
import torch
from torch import distributed
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning import PeerWatch

logging.basicConfig(format="%(message)s")
rank, port, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
try:
    with PeerWatch(2, silence=4.0):
        for step in range(30):
            distributed.all_reduce(torch.zeros(1))
            if step == 20 and rank == 1 and how == "own error":
                raise ArgumentError("lr=7: too high")
            if step == 20 and rank == 1 and how in ("SIGKILL", "SIGSTOP"):
                os.kill(os.getpid(), getattr(signal, how))
            if step == 20 and rank == 0 and how == "SIGSTOP":
                distributed.recv(torch.zeros(1), 1)
            if step == 20 and how == "broken":
                raise RuntimeError("of both")
            time.sleep(0.02)
        if rank == 0 and how == "late":
            time.sleep(3)
except (ArgumentError, RuntimeError) as error:
    sys.stderr.write(f"own: {error}\\n")
    os._exit(1)
"""


def two(how):
    """Statuses of two processes, and what they said on standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent), "OMP_NUM_THREADS": "1"}
    words = [[sys.executable, "-c", SCRIPT, str(rank), port, how] for rank in range(2)]
    started = [subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) for line in words]
    try:
        first = started[0].communicate(timeout=120)[1]
    finally:
        if how == "SIGSTOP":
            started[1].kill()
    second = started[1].communicate(timeout=60)[1]
    return [process.returncode for process in started], [first, second]


def test_a_process_that_is_killed_ends_the_other_with_one_line():
    (first, second), (said, _) = two("SIGKILL")
    assert (first, second) == (1, -signal.SIGKILL)
    assert said.startswith(f"{NAME}: num_processes=2: another one of them was killed")
    assert said.count("\n") == 1


def test_a_process_that_falls_silent_ends_the_other_although_it_waits_for_good():
    (first, _), (said, _) = two("SIGSTOP")
    assert first == 1
    assert said.startswith(f"{NAME}: num_processes=2: another")
    assert "has not answered for 4 s" in said
    assert said.count("\n") == 1


def test_a_mistake_of_one_is_its_own_line_and_the_other_says_that_it_is_alone():
    statuses, (first, second) = two("own error")
    assert statuses == [1, 1]
    assert second == "own: lr=7: too high\n"
    assert first.startswith(f"{NAME}: num_processes=2: another")


def test_what_all_run_into_is_said():
    statuses, said = two("broken")
    assert statuses == [1, 1]
    assert all("of both" in line for line in said)


@pytest.mark.parametrize("how", ["nothing", "late"])
def test_processes_that_end_by_themselves_are_no_loss(how):
    start = time.monotonic()
    assert two(how) == ([0, 0], ["", ""])
    assert time.monotonic() - start < 60
