"""ONNX programs in onnxruntime, with as many threads as torch has."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import ExportError, MissingDependencyError

Session: TypeAlias = Callable[..., tuple[Tensor, ...]]
Provider: TypeAlias = str | tuple[str, dict[str, int]]
CPU = torch.device("cpu")
FEATURE = "engine='onnxruntime'"
CUDA_PROVIDER = "CUDAExecutionProvider"


def required(feature: str, *packages: str) -> list[ModuleType]:
    """Imports the packages that a feature needs.

    Raises:
        MissingDependencyError: One of them is not installed.
    """
    try:
        return [importlib.import_module(package) for package in packages]
    except ImportError as error:
        raise MissingDependencyError.of(feature, str(error.name), "export") from error


def open_session(path: Path, device: torch.device = CPU) -> Session:
    """Reads an ONNX file into onnxruntime.

    Args:
        path: The file.
        device: Where it is computed, and where its answers are.

    Returns:
        A function of the program's inputs, on any device, that returns its outputs.

    Raises:
        ExportError: onnxruntime has no provider for the device.
        MissingDependencyError: onnxruntime is not installed.
    """
    (runtime,) = required(FEATURE, "onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # loaders and others need the cores
    session = runtime.InferenceSession(path, options, providers=providers(device))
    names = [one.name for one in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        fed = {name: np.asarray(one.cpu()) for name, one in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(one).to(device) for one in session.run(None, fed))

    return run


def providers(device: torch.device) -> list[Provider]:
    """What onnxruntime computes with on a device; on CUDA without TF32, which is no float32.

    Raises:
        ExportError: It has nothing for the device.
        MissingDependencyError: It is not installed.
    """
    (runtime,) = required(FEATURE, "onnxruntime")
    offered = runtime.get_available_providers()
    if device.type == "cpu":
        return ["CPUExecutionProvider"]
    if device.type != "cuda" or CUDA_PROVIDER not in offered:
        remedy = f"onnxruntime has {', '.join(offered)}; run on a CPU, install onnxruntime-gpu, or give --engine torch"
        raise ExportError.of("device", str(device), remedy)
    return [(CUDA_PROVIDER, {"device_id": device.index or 0, "use_tf32": 0}), "CPUExecutionProvider"]
