"""Interleaved timing, so that noise of the machine hits everything that is compared."""

import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

Step = Callable[[], object]
Key = TypeVar("Key")


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
    return low, median, high


def device_name(device: str | torch.device) -> str:
    """Model name of the GPU or of the processor."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return str(device)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return models[0] if models else platform.processor() or platform.machine()
