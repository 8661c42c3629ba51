"""Checkpoints that a run resumes from, each a file written by `torch.save` with its SHA-256 beside it."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol, TypedDict

import torch

from ..errors import CheckpointError, check_regular_file
from ..protocols.options import Arguments
from ..protocols.run_identity import check_format, sha256, stamp
from .atomic import explained, synchronize, write_text

RETAINED = 2  # if the newest is damaged, there is the one before
_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError)
_logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything with a state: modules, optimizers, gradient scalers."""

    def state_dict(self) -> Mapping[str, object]:
        """Returns the state."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restores a state."""


class ProcessStates(TypedDict):
    """The states of all processes."""

    shared: Mapping[str, Mapping[str, object]]  # name -> state that is the same in every process
    per_process: list[Mapping[str, Mapping[str, object]]]  # of each process, name -> state that may differ


class RunState(ProcessStates):
    """The content of a checkpoint."""

    step: int  # the last one taken
    identity: Arguments  # see `RunPlan.identity`


@dataclass(frozen=True)
class TrainingState:
    """Everything that the next step depends on, apart from the command line and the data."""

    shared: Mapping[str, Stateful]  # the same in every process: network, optimizer and so on
    per_process: Mapping[str, Stateful]
    gather: Callable[[list], list] = list  # concatenates a list over processes, like accelerate's `gather_object`
    process: int = 0  # index of this process
    # For a network that is divided over processes: gathers a state that `shared` has, and divides it for a part of it
    whole: Callable[[Mapping[str, object]], Mapping[str, object]] = lambda state: state
    divided: Callable[[Stateful, Mapping[str, object]], Mapping[str, object]] = lambda part, state: state

    def collect(self) -> ProcessStates:
        """Returns the state of all processes. Every process has to call it."""
        states = {name: part.state_dict() for name, part in self.per_process.items()}
        return {
            "shared": {name: self.whole(part.state_dict()) for name, part in self.shared.items()},
            "per_process": self.gather([states]),
        }

    def restore(self, state: ProcessStates) -> None:
        """Restores a state that `collect` returned."""
        for name, part in self.shared.items():
            part.load_state_dict(self.divided(part, state["shared"][name]))
        for name, part in self.per_process.items():
            part.load_state_dict(state["per_process"][self.process][name])


class Checkpoints:
    """The two newest checkpoints of a run, in a folder that is created when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: Mapping[str, object]) -> Path:
        """Writes the checkpoint of a step and prunes to the two newest. An error leaves earlier ones as they are."""
        path, fresh = self.folder / f"step-{step:06d}.pt", self.folder / ".new.pt"
        with explained(path):
            # Not its parents: a run folder that was removed must not come back half empty
            self.folder.mkdir(exist_ok=True)
            try:
                _write({**stamp(), "state": state}, fresh)
                # The digest goes first: alone it does no harm, whereas a checkpoint without one counts as damaged
                write_text(_digest_file(path), f"{sha256(fresh)}\n")
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
            synchronize(self.folder)
        self.prune(RETAINED)
        return path

    def prune(self, number: int) -> None:
        """Removes all but the newest."""
        for path in self._paths()[:-number]:
            try:
                _digest_file(path).unlink(missing_ok=True)
                path.unlink()
            except OSError as error:
                _logger.warning(f"{str(path)!r}: cannot be deleted ({error.strerror}); delete it by hand")

    def newest(self) -> dict[str, Any] | None:
        """Reads the newest intact checkpoint; None if there is none. Damaged ones are reported."""
        for path in reversed(self._paths()):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                _logger.warning(f"{error}; using the checkpoint before it")
        return None

    def describe(self) -> str:
        """Names the newest checkpoint."""
        return str(self._paths()[-1]) if self._paths() else "none yet"

    def _paths(self) -> list[Path]:
        steps = {path: path.stem.removeprefix("step-") for path in self.folder.glob("step-*.pt")}
        # By number: the alphabet has step-1000000 before step-999999
        return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint. If it is missing or not as it was written, a `CheckpointError` is raised."""
    try:
        # torch.load itself does not notice a flipped bit in a tensor
        check_regular_file(_digest_file(path))
        if sha256(path) != _digest_file(path).read_text().strip():
            raise ValueError(f"its SHA-256 is not that in {_digest_file(path).name}")
        stamped = torch.load(path, map_location="cpu", weights_only=True)
        state = stamped["state"]
    except _UNREADABLE as error:
        raise CheckpointError(f"checkpoint={str(path)!r}: is damaged ({_reason(error)})") from error
    check_format(stamped, f"checkpoint={str(path)!r}")
    return state


def _write(content: Mapping[str, object], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch's writer replaces the system's error, such as a full disk, by its own
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.flush()
        os.fsync(file.fileno())
    try:
        # An object that only pickle can read would make the run impossible to resume. mmap reads no tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        remedy = "a state may hold tensors, numbers, texts and containers of them"
        raise CheckpointError(f"checkpoint={str(path)!r}: cannot be read back ({_reason(error)}); {remedy}") from error


def _reason(error: Exception) -> str:
    """The cause in one line, without torch's advice to load the file unprotected."""
    cause = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
    return cause.strip().partition("\n")[0]


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
