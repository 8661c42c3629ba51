"""A trained run, opened to be looked at: its network, its data, and how images reach the network."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Domain, evaluation_transform, get_benchmark
from ..data.loaders import seeded_torch
from ..data.pixels import Pixels, Transform
from ..errors import ArgumentError
from ..layers.router import Router
from ..networks.build import Network, data_config, in_chans_of
from ..networks.trained import load_trained, takes_metadata
from ..storage.outcome import verify_model
from ..storage.run_folder import run_arguments

Batch = tuple[Tensor, ...]  # images (B, C, H, W), and the images' metadata where the network takes it


@dataclass(frozen=True)
class RunView:
    """An opened run.

    Attributes:
        folder: Of the run.
        args: Its arguments.
        model: The selected network, in evaluation mode.
        size: Height and width of its input, pixels.
        transform: From an image to the network's input.
        device: Where it runs.
        batch_size: Images at a time.
    """

    folder: Path
    args: dict[str, Any]
    model: Network
    size: tuple[int, int]
    transform: Transform
    device: str
    batch_size: int

    @property
    def name(self) -> str:
        """The model's registered name."""
        return str(self.args.get("model", type(self.model).__name__))

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the data's table that the network reads beside coordinates."""
        return self.args.get("metadata_columns") or ()

    @property
    def in_chans(self) -> int:
        """Bands of the images that the network takes."""
        return in_chans_of(self.model)

    def domains(self, data_dir: str | None = None) -> Sequence[Domain]:
        """Reads the run's data.

        Args:
            data_dir: Where it lies now; None for where it lay.

        Raises:
            DataError: It is not there.
        """
        folder = data_dir or self.args.get("data_dir")
        return get_benchmark(self.args["dataset"]).read(folder, self.columns, self.in_chans)

    def batches(self, domain: Domain, positions: Sequence[int]) -> Iterator[Batch]:
        """Yields images of a domain as the network takes them, in the order of the positions."""
        for start in range(0, len(positions), self.batch_size):
            part = positions[start : start + self.batch_size]
            images = self.inputs([domain.pixels(position) for position in part])
            rows = [row for position in part if (row := self.metadata(domain, position)) is not None]
            yield (images, torch.stack(rows).to(self.device)) if rows else (images,)

    def metadata(self, domain: Domain, position: int) -> Tensor | None:
        """An image's metadata, on CPU, where the network takes it; otherwise None."""
        if domain.metadata is None or not takes_metadata(self.model, [domain], self.columns):
            return None
        return torch.as_tensor(domain.metadata[position])

    def inputs(self, images: Sequence[Pixels]) -> Tensor:
        """Images as `Domain.pixels` has them -> (B, channels, height, width) on the device."""
        return torch.stack([self.transform(image) for image in images]).to(self.device)


def open_run(folder: Path, device: str = "cpu", batch_size: int = 64) -> RunView:
    """Opens a folder of finetune.py.

    Args:
        folder: The run's.
        device: Where the network is to run.
        batch_size: Images at a time.

    Raises:
        ArgumentError: It holds no run, or nothing that was evaluated yet.
        CheckpointError: The saved network cannot be read, or is not what was written.
    """
    check_run(folder)
    if not (folder / "best" / "model.safetensors").is_file():
        remedy = "holds no best/ yet: the run has not been evaluated; wait for its first evaluation"
        raise ArgumentError.of("run", str(folder), remedy)
    source = f"local-dir:{folder / 'best'}"
    verify_model(source)
    args = run_arguments(source)
    model = load_trained(source, img_size=args.get("img_size")).to(device)
    config = data_config(model, args.get("img_size"))
    size = config["input_size"][1:]
    view = evaluation_transform(size, config["mean"], config["std"])
    return RunView(folder, args, model, size, view, device, batch_size)


def redraw_routers(model: nn.Module, seed: int = 0) -> None:
    """Draws every router anew, as it is before training; all else stays trained. A baseline for what routers learned.

    Args:
        model: Changed in place.
        seed: Of the draws.
    """
    with seeded_torch(seed):
        for module in model.modules():
            if isinstance(module, Router):
                module.reset_parameters()


def check_run(folder: Path) -> None:
    """Makes sure that a folder is a run's.

    Raises:
        ArgumentError: It is not.
    """
    if not (folder / "args.yaml").is_file() or not (folder / "results.jsonl").is_file():
        remedy = "holds no args.yaml with results.jsonl; give a folder of finetune.py"
        raise ArgumentError.of("run", str(folder), remedy)
