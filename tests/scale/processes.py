"""Memory and open files of a process and its descendants, as Linux counts them under /proc."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_WATCH = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
"""


@dataclass(frozen=True)
class Usage:
    """What one process holds.

    Attributes:
        pid: Its number.
        rss: Resident memory in MiB, pages that it shares with others counted whole.
        pss: The same, a page that n processes share counted as 1 / n in each.
        private: Memory in MiB that it shares with nobody.
        descriptors: Open files, sockets and pipes.
        peak: The largest resident memory that it had so far, in MiB.
    """

    pid: int
    rss: float
    pss: float
    private: float
    descriptors: int
    peak: float


def usage(pid: int) -> Usage:
    """Looks at one process.

    Raises:
        OSError: It has ended.
    """
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(size.split()[0]) / 1024 for name, size in (line.split(":") for line in lines)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    status = dict(line.split(":", 1) for line in (PROC / str(pid) / "status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) / 1024
    return Usage(pid, sizes["Rss"], sizes["Pss"], private, len(os.listdir(PROC / str(pid) / "fd")), peak)


def family(pid: int) -> list[Usage]:
    """Looks at a process, first, and all its descendants in the order of their numbers; those that end are left out."""
    parents = dict(_parents())
    pids = [pid, *(one for one in sorted(parents) if pid in _ancestors(one, parents))]
    found = []
    for one in pids:
        try:
            found.append(usage(one))
        except (OSError, KeyError):  # a process that has ended and is not waited for has no memory
            continue
    return found


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


def peak(command: Sequence[str]) -> str:
    """Runs a command, whose output is dropped, and says how long it took and how much memory it had at most.

    Raises:
        CalledProcessError: It failed.
    """
    found = cost(command)
    return f"{found.seconds:.1f} s, of which processor {found.processor:.1f} s; peak {found.peak:.0f} MiB"


def total(found: Sequence[Usage]) -> float:
    """The memory of several processes together in MiB, each page counted once."""
    return sum(one.pss for one in found)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:
                continue
            yield int(folder.name), int(text.rpartition(")")[2].split()[1])


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    """All of them, a process itself left out."""
    found = set[int]()
    while pid in parents:
        pid = parents[pid]
        found.add(pid)
    return found
