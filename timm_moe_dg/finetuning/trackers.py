"""TensorBoard and Weights & Biases beside results.jsonl, through accelerate; their files go into the run folder."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..errors import MissingDependencyError

TRACKERS = ("tensorboard", "wandb")


class Trackers:
    """Logs numbers by step, from the main process.

    Args:
        names: Which of `TRACKERS`.
        folder: The run folder.
        args: The run's arguments.
        first_step: Where the run goes on; what an earlier process logged from there on is superseded.

    Raises:
        MissingDependencyError: A tracker's package is not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, args: Mapping[str, Any], first_step: int = 0) -> None:
        for name in names:
            if find_spec(name) is None:
                raise MissingDependencyError.of(f"--log-{name}", name, "tracking")
        self.names = names
        self.folder = folder
        self.args = args
        self.first_step = first_step
        self._started: list[Any] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Logs values; the first call needs the run folder to be there."""
        if self.names and not self._started:
            self._started = [getattr(self, f"_start_{name}")() for name in self.names]
        for tracker in self._started:
            tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Writes what is pending."""
        for tracker in self._started:
            tracker.finish()

    def _start_tensorboard(self) -> Any:
        from accelerate.tracking import TensorBoardTracker

        tracker = TensorBoardTracker("tensorboard", self.folder, purge_step=self.first_step)
        tracker.start()
        tracker.writer.add_text("args", f"```yaml\n{yaml.safe_dump(dict(self.args))}```")  # its own form takes no lists
        return tracker

    def _start_wandb(self) -> Any:
        from accelerate.tracking import WandBTracker

        options = {"name": self.folder.name, "id": self.folder.name, "resume": "allow", "dir": str(self.folder)}
        tracker = WandBTracker("timm_moe_dg", **options)
        tracker.start()
        tracker.store_init_configuration(dict(self.args))
        return tracker
