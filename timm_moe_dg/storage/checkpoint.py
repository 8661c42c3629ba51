"""Checkpoints that a run can be resumed from: any nested state, written atomically and checked when read.

A checkpoint is a folder of three files: tensors.safetensors, state.json (everything else, with the tensors' places in
it, the format's number and versions) and checksums.json. Nothing in it is pickled.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import CheckpointError, FormatError
from ..protocols.options import Arguments
from ..protocols.run_identity import check_format, stamp
from .atomic import replaced
from .checksums import damage, json_of, write_checksums

TENSORS, STATE = "tensors.safetensors", "state.json"
KEPT = 2  # if the newest is damaged, there is the one before
_logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What has a state: modules, optimizers, gradient scalers."""

    def state_dict(self) -> Mapping[str, object]:
        """Returns the state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Takes a state over."""


class ProcessStates(TypedDict):
    """The states of all processes.

    Attributes:
        shared: Name -> state of what is the same in every process.
        own: For every process, name -> state of what may differ.
    """

    shared: Mapping[str, Mapping[str, object]]
    own: list[Mapping[str, Mapping[str, object]]]


class RunState(ProcessStates):
    """What a run goes on from.

    Attributes:
        step: The last that was taken.
        identity: All that the numbers of the run follow from.
        records: The evaluations before, as lines of results.jsonl; earlier releases kept no copy.
    """

    step: int
    identity: Arguments
    records: NotRequired[list[str]]


@dataclass(frozen=True)
class TrainingState:
    """All that the next step depends on besides the command line and the data.

    Attributes:
        shared: What is the same in every process: network, optimizer and so on, by name.
        own: What may differ from process to process.
        gather: Collects a list of objects over processes, as accelerate's `gather_object` does.
        process: This process's index.
    """

    shared: Mapping[str, Stateful]
    own: Mapping[str, Stateful]
    gather: Callable[[list], list] = list
    process: int = 0

    def collect(self) -> ProcessStates:
        """Returns the state of all processes, which have to ask for it together."""
        own = {name: part.state_dict() for name, part in self.own.items()}
        return {
            "shared": {name: part.state_dict() for name, part in self.shared.items()},
            "own": self.gather([own]),
        }

    def restore(self, state: ProcessStates) -> None:
        """Puts everything back to what `collect` found."""
        for name, part in self.shared.items():
            part.load_state_dict(state["shared"][name])
        for name, part in self.own.items():
            part.load_state_dict(state["own"][self.process][name])


class Checkpoints:
    """The checkpoints of a run, the last two of which are kept.

    Args:
        folder: Where they lie; created when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: Mapping[str, object]) -> Path:
        """Writes the checkpoint of a step and removes those before the last two.

        Raises:
            StorageError: It cannot be written; those before are then untouched.
            CheckpointError: The state holds something that is neither a tensor, a number, text, nor a nesting of them.
        """
        target = self.folder / _name(step)
        tensors: dict[str, Tensor] = {}
        skeleton = _pack(state, "state", tensors)
        with replaced(target) as fresh:
            save_file(tensors, fresh / TENSORS)
            (fresh / STATE).write_text(json.dumps({**stamp(), "state": skeleton}))
            write_checksums(fresh)
        self.keep(KEPT)
        return target

    def keep(self, number: int) -> None:
        """Removes all but the newest."""
        for old in self._paths()[:-number]:
            shutil.rmtree(old)

    def at(self, step: int) -> dict[str, object] | None:
        """Reads the checkpoint of a step; None if it is not there or damaged."""
        try:
            return read_checkpoint(self.folder / _name(step))
        except CheckpointError:
            return None

    def newest(self) -> dict[str, object] | None:
        """Reads the newest checkpoint that is complete; None if there is none. Damaged ones are reported.

        Raises:
            FormatError: It is of another format.
        """
        for path in reversed(self._paths()):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                _logger.warning(f"{error}; taking the one before")
        return None

    def describe(self) -> str:
        """Names the newest checkpoint."""
        return str(self._paths()[-1]) if self._paths() else "none yet"

    def _paths(self) -> list[Path]:
        found = [path for path in self.folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _name(step: int) -> str:
    return f"step-{step:06d}"


def read_checkpoint(path: Path) -> dict[str, object]:
    """Reads a checkpoint.

    Raises:
        CheckpointError: Something is missing from it, or is not what was written.
        FormatError: It is of another format.
    """
    try:
        if found := damage(path, (TENSORS, STATE)):
            raise CheckpointError(f"checkpoint={str(path)!r}: is damaged ({found})")
        stamped = _table(json_of((path / STATE).read_text()))
        check_format(stamped, f"checkpoint={str(path)!r}")
        # Before formats were numbered, the state stood there alone
        return _unpack(stamped["state"] if "format" in stamped else stamped, load_file(path / TENSORS))
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint={str(path)!r}: is damaged ({type(error).__name__}: {error})") from error


def _table(state: object) -> dict[str, object]:
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} holds no table")
    return state


def _pack(value: object, place: str, tensors: dict[str, Tensor]) -> object:
    """Turns nested containers into what JSON can hold; tensors go into `tensors` under their place."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        name = f"{len(tensors)}.{place}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()  # safetensors refuses shared memory
        return {"tensor": name}
    if isinstance(value, list):
        return [_pack(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": _pack(list(value), place, tensors)}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(item, f"{place}.{key}", tensors)] for key, item in value.items()]}
    raise CheckpointError(f"{place}={value!r}: a {type(value).__name__} cannot be kept in a checkpoint")


def _unpack(value: object, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_unpack(content, tensors))
    return {key: _unpack(item, tensors) for key, item in content}
