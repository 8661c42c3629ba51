"""Progress of a run: mean losses, the progress bar, the table of domains, TensorBoard and Weights & Biases."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import TypedDict

import torch
import yaml
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from tqdm.notebook import tqdm as notebook_bar

from ..cli.text import duration, one_line
from ..data.inspection import digest
from ..errors import ArgumentError, MissingDependencyError
from ..protocols.options import Arguments, RunOptions
from ..protocols.records import OOD_VALIDATION, Record, RoleScores
from ..protocols.selection import summary, validates_on_test_groups, worst_groups

LINE_EVERY = 60.0  # seconds
TRACKERS = ("tensorboard", "wandb")
_logger = logging.getLogger(__name__)


class MeterState(TypedDict):
    """The state of a `StepMeter`."""

    steps: int
    sums: dict[str, Tensor]
    seconds: float


class StepMeter:
    """Means of losses and of the time per step since the last evaluation, without waiting for the device."""

    def __init__(self, images_per_step: int = 0) -> None:
        self.images_per_step = images_per_step  # over all domains and processes
        self.restart()

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Counts one step with its scalar losses."""
        self._steps += 1
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)).to(value.device) + value

    def take(self) -> tuple[dict[str, Tensor], float]:
        """Returns the mean of each loss and the seconds per step."""
        means = {name: total / self._steps for name, total in self._sums.items()}
        return means, (time.perf_counter() - self._start) / self._steps

    def total(self) -> Tensor:
        """Sum of the loss, finite only if every step's loss was."""
        return self._sums["loss"]

    def rate(self) -> float:
        """Images per second."""
        return self._steps * self.images_per_step / (time.perf_counter() - self._start)

    def restart(self) -> None:
        """Starts anew. Call it when training goes on after an evaluation."""
        self.load_state_dict({"steps": 0, "sums": {}, "seconds": 0.0})

    def state_dict(self) -> MeterState:
        """Returns the state."""
        return {"steps": self._steps, "sums": self._sums, "seconds": time.perf_counter() - self._start}

    def load_state_dict(self, state: MeterState) -> None:
        """Restores a state."""
        self._steps = state["steps"]
        self._sums: dict[str, Tensor] = dict(state["sums"])
        self._start = time.perf_counter() - state["seconds"]


class StepBar:
    """Shows the steps that it yields: a bar in a notebook or on a terminal, otherwise lines, one a minute."""

    def __init__(self, steps: range, name: str, *, hidden: bool = False) -> None:
        self._bars = sys.stderr.isatty() or issubclass(tqdm, notebook_bar)
        self._hidden = hidden
        self._steps, self._name = steps, name
        self._bar = tqdm(
            steps, name, steps.stop, initial=steps.start, unit="step", disable=hidden or not self._bars, file=sys.stderr
        )
        self._began = self._last = time.monotonic()

    def __iter__(self) -> Iterator[int]:
        yield from self._bar
        self._line(self._steps.stop, "")

    def show(self, step: int, loss: float, rate: float) -> None:
        """Shows the loss of a step and the images per second."""
        self._bar.set_postfix({"loss": loss, "images/s": round(rate)})
        if time.monotonic() - self._last >= LINE_EVERY:
            self._last = time.monotonic()
            left = (self._last - self._began) / (step + 1 - self._steps.start) * (self._steps.stop - step - 1)
            self._line(step + 1, f", loss {loss:.4f}, {rate:.0f} images/s, {duration(left)} left")

    def _line(self, taken: int, further: str) -> None:
        if not (self._bars or self._hidden):
            sys.stderr.write(f"{self._name}: {taken}/{self._steps.stop} steps{further}\n")


def domain_table(record: Record, names: Sequence[str]) -> str:
    """Formats an evaluation as a text table with one row for each domain."""
    losses = "  ".join(f"{name} {value:.4f}" for name, value in record.losses.items())
    width = max(len("domain"), *map(len, names))
    lines = [
        f"step {record.step}  epoch {record.epoch:.1f}  {losses}  {record.step_time:.3f} s/step",
        f"  {'domain':<{width}}  {'role':<5}  in acc  out acc",
    ]
    for domain, (name, inside, outside) in enumerate(zip(names, record.in_acc, record.out_acc, strict=True)):
        role = "test" if domain in record.test_domains else "train"
        lines.append(f"  {name:<{width}}  {role:<5}  {_share(inside):>6}  {_share(outside):>7}")
    labels = {OOD_VALIDATION: f"{OOD_VALIDATION} (held-out groups: oracle)"} if validates_on_test_groups(record) else {}
    lines += [role_line(labels.get(role, role), scores) for role, scores in record.roles.items()]
    return "\n".join(map(one_line, [*lines, f"  {summary(record)}"]))


def _share(value: float) -> str:
    return "-" if isnan(value) else f"{value:.4f}"


def role_line(role: str, scores: RoleScores) -> str:
    """Formats the scores of one role of `Record.roles`, and the number of images of each group, in one line."""
    numbers = ", ".join(f"{group} {number}" for group, number in scores["num_samples"].items())
    return one_line(
        f"  {role}: accuracy {scores['accuracy']:.4f}, worst group {scores['worst_accuracy']:.4f} "
        f"({', '.join(worst_groups(scores))}), F1-macro {scores['f1_macro']:.4f}; images: {numbers}"
    )


def wanted_trackers(options: RunOptions) -> list[str]:
    """Names of the trackers that the options switch on."""
    return [name for name in TRACKERS if vars(options)[f"log_{name}"]]


def check_trackers(names: Sequence[str]) -> None:
    """Checks that trackers are installed, and that Weights & Biases has a key or is offline."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependencyError.of(f"--log-{name}", name, "tracking")
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.api.api_key:
            remedy = "Weights & Biases has no key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
            raise ArgumentError.of("log_wandb", True, remedy)


@contextmanager
def tracker_errors_logged() -> Iterator[None]:
    """Turns a tracker's disk error into a warning: no result of a run depends on its trackers."""
    try:
        yield
    except OSError as error:
        _logger.warning(f"the trackers cannot write ({error}); the run goes on")


def silence_writer() -> None:
    """Keeps TensorBoard's thread from printing the traceback of a disk error.

    TensorBoard raises the same error again in the next call, where `tracker_errors_logged` turns it into a warning.
    """
    printed = threading.excepthook

    def hook(failure: threading.ExceptHookArgs) -> None:
        if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__name__ == "_AsyncWriterThread"):
            printed(failure)

    threading.excepthook = hook


def start_trackers(accelerator: Accelerator, folder: Path, args: Arguments, first_step: int) -> None:
    """Starts the accelerator's trackers, which write into the run folder.

    Entries of an earlier process from `first_step` on are replaced.
    """
    accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
    run_id = digest(bytes(folder.resolve()))  # runs of two sweeps share their names
    options = {
        "tensorboard": {"purge_step": first_step},
        "wandb": {"name": folder.name, "id": run_id, "resume": "allow", "dir": str(folder), "config": dict(args)},
    }
    silence_writer()
    accelerator.init_trackers("timm_moe_dg", init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            # accelerate would pass the arguments to add_hparams, which takes no lists
            tracker.writer.add_text("args", f"```yaml\n{yaml.safe_dump(dict(args))}```")
