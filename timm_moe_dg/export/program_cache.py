"""ONNX programs of networks, kept in a folder of the user's, each under the hash of all that it was made of.

An entry is a folder with model.onnx (and its weights in a file beside it, beyond 2 GB), made_of.json, whose hash is the
folder's name, and the checksums of both. What is damaged, or lies under another's name, is made again.
"""

import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import StorageError
from ..protocols.run_identity import stamp
from ..storage.atomic import replaced
from ..storage.checksums import damage, file_hash, write_checksums
from .programs import OPSET, RECORDED_BATCH, Inputs, record_program, save_onnx

ENVIRONMENT = "TIMM_MOE_DG_CACHE"
PROGRAM, MADE_OF = "model.onnx", "made_of.json"
LEFT_BY_A_FORWARD = ("path", "report", "routing")  # attributes of mixture layers that no forward depends on
_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where programs are kept: below $TIMM_MOE_DG_CACHE, or $XDG_CACHE_HOME/timm_moe_dg, or ~/.cache/timm_moe_dg."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(ENVIRONMENT) or Path(caches, "timm_moe_dg"), "programs")


def cached_program(network: nn.Module, inputs: Inputs) -> Path:
    """Returns the ONNX file of a network, which is written if it is not there; the batch may have any size.

    Args:
        network: In evaluation mode.
        inputs: A sample or more.

    Raises:
        MissingDependencyError: It has to be written, and onnx or onnxscript is not installed.
        StorageError: It cannot be written.
    """
    made_of = describe(network, inputs)
    folder = cache_folder() / hashlib.sha256(made_of.encode()).hexdigest()
    if _is_whole(folder):
        return folder / PROGRAM
    try:
        with _alone(folder.parent):
            if not _is_whole(folder):  # no other process was faster
                _write(network, inputs, made_of, folder)
    except (StorageError, OSError) as error:
        reason = error.__cause__ or error
        remedy = f"cannot be written ({reason}); set {ENVIRONMENT} to a folder with space, or give --engine torch"
        raise StorageError(f"cache={str(folder.parent)!r}: {remedy}") from error
    return folder / PROGRAM


def describe(network: nn.Module, inputs: Inputs) -> str:
    """All that decides a program, as JSON: weights, settings of every module and their sources, inputs, versions."""
    modules = dict(network.named_modules())
    tensors = [*network.named_parameters(), *network.named_buffers()]
    packages = {name: _version(name) for name in ("onnx", "onnxscript")}
    made_of = {
        "versions": {**stamp(), **packages, "opset": OPSET},
        "inputs": [[str(one.dtype), list(one.shape[1:])] for one in inputs],
        "weights": {name: _hash(value) for name, value in tensors},
        "sources": {name: _source_hash(name) for name in sorted({type(one).__module__ for one in modules.values()})},
        "modules": {name: _settings(module) for name, module in modules.items()},
    }
    return json.dumps(made_of, indent=1)


def _is_whole(folder: Path) -> bool:
    """Whether an entry is there as it was written; says so if it is damaged."""
    if not folder.exists():
        return False
    found = damage(folder, (PROGRAM, MADE_OF))
    if found is None and file_hash(folder / MADE_OF) != folder.name:
        found = "it is that of another network"
    if found is not None:
        _logger.warning(f"{folder}: {found}; making it again")
    return found is None


def _write(network: nn.Module, inputs: Inputs, made_of: str, folder: Path) -> None:
    _logger.info(f"making an ONNX program of the network, to be kept in {folder}")
    # A batch of one would be taken for a constant; tensors of inference mode cannot be recorded
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = tuple(torch.cat([one[:RECORDED_BATCH]] * RECORDED_BATCH)[:RECORDED_BATCH] for one in inputs)
        program = record_program(network, samples)
        with replaced(folder) as fresh:
            save_onnx(program, fresh / PROGRAM)
            (fresh / MADE_OF).write_text(made_of, encoding="utf-8")
            write_checksums(fresh)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; on a system or a file system without locks, as many as come."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _settings(module: nn.Module) -> dict[str, object]:
    own = {name: _value(value) for name, value in vars(module).items() if name not in LEFT_BY_A_FORWARD}
    return {"class": type(module).__qualname__, **own}


def _value(value: object) -> object:
    """A setting as JSON: numbers, texts, types and tensors by what they are, anything else by its kind."""
    if isinstance(value, tuple | list):
        return [_value(one) for one in value]
    if isinstance(value, Tensor):
        return _hash(value)
    if isinstance(value, bool | int | float | str | None | torch.dtype | torch.device):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _hash(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(raw.data)
    return found.hexdigest()


def _source_hash(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file and file_hash(Path(file))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
