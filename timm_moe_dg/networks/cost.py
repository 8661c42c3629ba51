"""What a mixture costs: operation counts, peak memory, interleaved timing, and the dense models to compare it with."""

import copy
import ctypes
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ArgumentError, ProcessLostError
from ..layers import RoutedMlp
from ..layers.encoders.location import LocationIdEmbedding
from ..layers.feed_forwards import read_feed_forward
from .averages import dense_name
from .build import Network

Step = Callable[[], object]
Key = TypeVar("Key")
Options: TypeAlias = dict[str, Any]  # keyword arguments of `timm.create_model`
TWIN = "dense twin"  # the timm model that the mixture's weights come from
# The twin with a feed-forward K times as wide in the mixture blocks (1 + K for MoGE): as much arithmetic, no routing
EQUIVALENT = "FLOP-equivalent"


def count_macs(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Multiply-accumulates of one forward pass in convolutions, matrix products and attention, for the whole batch.

    The model is left in evaluation mode. A layer that is one fused operator (torch.nn.TransformerEncoderLayer in
    evaluation mode) counts nothing. timm's models have none.
    """
    model.eval()
    counter = FlopCounterMode(display=False)
    # The reference kernel consists of matrix products; the counter misses some of the fused attention kernels
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(*inputs)
    return counter.get_total_flops() // 2


def peak_memory(build: Callable[[], Step], device: str, threads: int) -> float:
    """Peak MiB of building some work and repeating it three times, in a new process, for which `build` is pickled.

    The memory is allocated on a GPU, or resident beyond the imports on a CPU (on Linux alone).
    """
    # Read by the C library of the new process: it returns freed tensors at once, so that only tensors in use count
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**16))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, build, device, threads).result()
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


def _measure(build: Callable[[], Step], device: str, threads: int) -> float:
    torch.set_num_threads(threads)
    torch.randn(512, 512).mm(torch.randn(512, 512))  # allocates the matrix library's buffers
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak so far
    before = _resident_peak()
    step = build()
    for _ in range(3):
        step()
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return _resident_peak() - before


def _resident_peak() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def seconds_of(step: Step, device: str | torch.device) -> float:
    """Seconds that one call takes, until the device has finished."""
    start = time.perf_counter()
    step()
    # Only CPU work is finished when the call returns
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start


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


def device_name(device: str) -> str:
    """Model name of the GPU, or what the system tells about the processor."""
    is_cuda = torch.device(device).type == "cuda"
    return torch.cuda.get_device_name(device) if is_cuda else platform.processor() or platform.machine()


def mixture_layers(model: Network) -> dict[str, Network]:
    """The mixture layers of a model by name. A model without any is an `ArgumentError`."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoutedMlp)}
    if not layers:
        name = model.pretrained_cfg["architecture"]
        raise ArgumentError.of("model", name, "has no mixture layers; give a mixture, such as gmoe_small_patch16")
    return layers


def mixture_and_baselines(name: str, options: Options) -> dict[str, Callable[[], nn.Module]]:
    """Functions that build a mixture model and its dense baselines, by label: `name`, `TWIN`, `EQUIVALENT`."""
    plan = timm.create_model(name, device="meta", **options)
    layer = next(iter(mixture_layers(plan).values()))
    # The feed-forwards that a token passes
    width = layer.router.top_k * layer.options.expert_width + (layer.shared is not None)
    return {
        name: partial(timm.create_model, name, **options),
        TWIN: partial(_dense_model, plan, options),
        EQUIVALENT: partial(_dense_model, plan, options, width),
    }


def random_inputs(model: Network, batch_size: int, device: str) -> tuple[Tensor, ...]:
    """Random images, and metadata for a model that reads any."""
    # Networks of one size; the others take any
    fixed_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = fixed_size or resolve_model_data_config(model)["input_size"][1:]
    images = torch.randn(batch_size, 3, *size, device=device)
    encoder = getattr(getattr(model, "metadata_encoder", None), "encoder", None)
    if encoder is None:
        return (images,)
    if isinstance(encoder, LocationIdEmbedding):
        return images, torch.randint(encoder.num_locations, (batch_size,), device=device)
    degrees = torch.tensor([360.0, 180.0], device=device)
    return images, (torch.rand(batch_size, 2, device=device) - 0.5) * degrees


def _dense_model(plan: Network, options: Options, factor: float = 1) -> nn.Module:
    """The dense model that `plan` is upcycled from, its mixture blocks' feed-forwards `factor` times as wide."""
    size = {key: options[key] for key in ("img_size",) if key in options}
    dense = timm.create_model(dense_name(plan), num_classes=plan.num_classes, **size)
    for place in mixture_layers(plan) if factor > 1 else ():
        dense.set_submodule(place, _widened(dense.get_submodule(place), factor))
    return dense


def _widened(mlp: nn.Module, factor: float) -> nn.Module:
    """A new feed-forward with `factor` times as many hidden features, without its inner normalization."""
    parts, wide = read_feed_forward(mlp), copy.deepcopy(mlp)
    for name, layer in mlp.named_children():
        if layer in (*parts.first, parts.second):
            rows, columns = layer.get_parameter("weight").shape[:2]
            is_second = layer is parts.second
            rows, columns = (rows, round(columns * factor)) if is_second else (round(rows * factor), columns)
            make: Any = partial(nn.Conv2d, kernel_size=1) if parts.channels_first else nn.Linear
            setattr(wide, name, make(columns, rows, bias=layer.bias is not None))
        elif layer is parts.norm:
            setattr(wide, name, nn.Identity())
    return wide
