"""Seconds and memory that a command takes, with the processes that it starts."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WATCH = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


@dataclass(frozen=True)
class Cost:
    """What a command took, with the processes that it started and waited for.

    Attributes:
        seconds: On the clock.
        processor: Seconds of processors.
        peak: The largest resident memory of one process, in MiB.
    """

    seconds: float
    processor: float
    peak: float


def cost(command: Sequence[str], env: Mapping[str, str] | None = None) -> Cost:
    """Runs a command, whose output is dropped, and measures it.

    Args:
        command: Its words.
        env: Its environment; None for this process's own.

    Raises:
        CalledProcessError: It failed.
    """
    # A process inherits the peak of the one that starts it: this one's, which has torch, would hide the command's
    between = [sys.executable, "-S", "-c", _WATCH, *command]
    found = subprocess.run(between, check=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return Cost(*map(float, found.stdout.split()))
