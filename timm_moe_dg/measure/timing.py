"""Times of things that are compared: interleaved, so that what else a machine does hits all of them alike."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

Step = Callable[[], object]


class Quartiles(NamedTuple):
    """The middle half of some values.

    Attributes:
        low: A quarter of the values lies below it.
        median: Half of them does.
        high: Three quarters do.
    """

    low: float
    median: float
    high: float


def seconds_of(step: Step, device: str | torch.device = "cpu", repeats: int = 1) -> float:
    """Seconds of one step, the mean over repeats, to the end of what it started on the device.

    Args:
        step: What is timed; its result is dropped.
        device: Where it computes; torch waits for every device but a CPU.
        repeats: Times that it is done in a row, within one measurement.
    """
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) / repeats


def device_name(device: str | torch.device) -> str:
    """What a machine calls the device: a GPU's name, or the processor's."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    if torch.device(device).type != "cpu":
        return str(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def interleaved(measures: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[str, list[float]]:
    """Takes measurements in turn, A B C A B C.

    Args:
        measures: Name -> function that measures once, such as `seconds_of` with its arguments.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.

    Returns:
        Name -> what was measured, one value per round.
    """
    taken = [{name: measure() for name, measure in measures.items()} for _ in range(warmup + rounds)]
    return {name: [values[name] for values in taken[warmup:]] for name in measures}


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Value over reference, each within its round."""
    return [one / other for one, other in zip(values, reference, strict=True)]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Quartiles of two values or more, as `statistics.quantiles` defines them."""
    return Quartiles(*statistics.quantiles(values, n=4))
