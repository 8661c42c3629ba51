"""Memory of repeated work: its peak, each measurement in a process of its own, and keeping what is freed."""

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVarTuple

import torch

Step = Callable[[], None]
Given = TypeVarTuple("Given")


def peak_memory(
    build: Callable[[*Given], Step], *arguments: *Given, device: str, threads: int, repeats: int = 3
) -> float:
    """Measures what some work needs at the most, with what it was built from.

    On a CPU (Linux only) the process hands freed tensors back to the system at once, so that what is counted is tensors
    in use, as on a GPU, and not what the C library keeps for later.

    Args:
        build: Makes everything and returns the work; a function that the new process can import.
        *arguments: Given to `build`.
        device: Torch device that the work runs on.
        threads: CPU threads.
        repeats: How often the work is done.

    Returns:
        MiB: allocated on a GPU, resident beyond the imports on a CPU.
    """
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))  # read by the process that is started next
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (build, arguments, device, threads, repeats))


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory instead of handing large blocks back to the system; nothing elsewhere.

    A block that was handed back costs a page fault for every 4 KiB when it is taken again. Whether it was depends on
    all that was allocated before, so that the same work takes one time or another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # names of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _measure(
    build: Callable[[*Given], Step], arguments: tuple[*Given], device: str, threads: int, repeats: int
) -> float:
    torch.set_num_threads(threads)
    torch.randn(512, 512).mm(torch.randn(512, 512))  # the matrix library's own buffers
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _resident_peak()
    step = build(*arguments)
    for _ in range(repeats):
        step()
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return _resident_peak() - before


def _resident_peak() -> float:
    """MiB of this process's largest resident size so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
