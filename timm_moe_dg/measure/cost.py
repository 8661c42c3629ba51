"""Multiply-accumulates, peak memory with the allocator's setting for benchmarks, and interleaved timing."""

import ctypes
import multiprocessing
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..compat import GROUPED_PRODUCT
from ..errors import ArgumentError, ProcessLostError

Step = Callable[[], object]
Key = TypeVar("Key")


# An operator that torch's counter does not have: of (A, D) and (E, D, H), each row is multiplied by one matrix
_FLOPS: dict[Any, Callable[..., int]] = {GROUPED_PRODUCT: lambda rows, stack, *_, **options: 2 * prod(rows) * stack[-1]}


def count_macs(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Multiply-accumulates of one forward pass in convolutions, matrix products and attention, for the whole batch.

    The model is left in evaluation mode. A layer that is one fused operator (torch.nn.TransformerEncoderLayer in
    evaluation mode) counts nothing. timm's models have none.
    """
    model.eval()
    counter = FlopCounterMode(display=False, custom_mapping=_FLOPS)
    # The reference kernel consists of matrix products; the counter misses some of the fused attention kernels
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(*inputs)
    return counter.get_total_flops() // 2


def peak_memory(build: Callable[[], Step], device: str, threads: int, repeats: int = 3) -> float:
    """Peak MiB of building and repeating some work, in a new process, for which `build` is pickled.

    The memory is allocated on a GPU, or resident beyond the imports on a CPU (on Linux alone).
    """
    # Read by the C library of the new process: it returns freed tensors at once, so that only tensors in use count
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, build, device, threads, repeats).result()
        except BrokenProcessPool as error:
            remedy = "the measuring process ended, perhaps for lack of memory; lower --batch-size, or add --no-memory"
            raise ProcessLostError(f"memory=True: {remedy}") from error


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, so that timed steps do not wait for page faults; does nothing elsewhere."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # constants of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _measure(build: Callable[[], Step], device: str, threads: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    torch.randn(512, 512).mm(torch.randn(512, 512))  # allocates the matrix library's buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak so far
    before = _resident_peak()
    step = build()
    for _ in range(repeats):
        step()
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return _resident_peak() - before


def _resident_peak() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def seconds_of(step: Step, device: str | torch.device = "cpu", repeats: int = 1) -> float:
    """Seconds that one call takes: the mean over `repeats` calls, until the device has finished."""
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    # Only CPU work is finished when the call returns
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / repeats


def interleaved(measures: Mapping[Key, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[Key, list[float]]:
    """Takes measurements in turns, A B C A B C. The values of the first `warmup` rounds are dropped."""
    values = [{name: measure() for name, measure in measures.items()} for _ in range(warmup + rounds)]
    return {name: [row[name] for row in values[warmup:]] for name in measures}


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Value over reference, round by round."""
    return [value / base for value, base in zip(values, reference, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of two values or more."""
    low, median, high = statistics.quantiles(values, n=4)
    return max(low, min(values)), median, min(high, max(values))  # of two values it extrapolates


def check_idle(device: str) -> None:
    """Refuses a GPU with more than a quarter of its memory in use, where other programs would disturb measurements."""
    if torch.device(device).type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < 0.75 * total:
        busy = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB are in use"
        raise ArgumentError.of("device", device, f"{busy}; end the programs there, or choose another device")


def device_name(device: str | torch.device) -> str:
    """Model name of the GPU or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return str(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return models[0] if models else platform.processor() or platform.machine()
