"""A trained run, opened for analysis: its network, its data, and the transform between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Domain, evaluation_transform, get_benchmark
from ..data.bands import Pixels, Transform
from ..data.loaders import seeded_torch
from ..errors import ArgumentError
from ..layers.router import Router
from ..networks.build import Network, data_config, in_chans_of
from ..networks.trained import load_trained, takes_metadata
from ..storage.run_folder import run_arguments

Batch = tuple[Tensor, ...]  # images (B, C, H, W), and metadata (B, ...) if the network takes it


@dataclass(frozen=True)
class RunView:
    """An opened run.

    Attributes:
        folder: The run's folder.
        args: The run's arguments.
        model: The selected network, in evaluation mode.
        size: Height and width of the network's input, pixels.
        transform: Maps an image to the network's input.
        device: The network's device.
        batch_size: Images per forward pass.
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
        """Columns of metadata.csv that the network takes in addition to coordinates."""
        return self.args.get("metadata_columns") or ()

    @property
    def in_chans(self) -> int:
        """Number of bands of the network's input."""
        return in_chans_of(self.model)

    def domains(self, data_dir: str | None = None) -> Sequence[Domain]:
        """Reads the run's data.

        Args:
            data_dir: Folder of the data; None for the one that the run was trained on.

        Raises:
            DataError: The data is missing or cannot be read.
        """
        folder = data_dir or self.args.get("data_dir")
        return get_benchmark(self.args["dataset"]).read(folder, self.columns, self.in_chans)

    def batches(self, domain: Domain, positions: Sequence[int]) -> Iterator[Batch]:
        """Yields inputs of the network for images of a domain, in the order of the positions."""
        for start in range(0, len(positions), self.batch_size):
            part = positions[start : start + self.batch_size]
            images = self.inputs([domain.pixels(position) for position in part])
            rows = [row for position in part if (row := self.metadata(domain, position)) is not None]
            yield (images, torch.stack(rows).to(self.device)) if rows else (images,)

    def metadata(self, domain: Domain, position: int) -> Tensor | None:
        """An image's metadata on CPU; None if the network takes none."""
        if domain.metadata is None or not takes_metadata(self.model, [domain], self.columns):
            return None
        return torch.as_tensor(domain.metadata[position])

    def inputs(self, images: Sequence[Pixels]) -> Tensor:
        """Transforms images from `Domain.pixels` -> (B, channels, height, width) on the device."""
        return torch.stack([self.transform(image) for image in images]).to(self.device)


def open_run(folder: Path, device: str = "cpu", batch_size: int = 64) -> RunView:
    """Opens a folder of finetune.py.

    Args:
        folder: The run's folder.
        device: Device for the network.
        batch_size: Images per forward pass.

    Raises:
        ArgumentError: The folder holds no run, or one without a selected network yet.
        CheckpointError: The saved network cannot be read.
    """
    check_run(folder)
    if not (folder / "best" / "model.safetensors").is_file():
        remedy = "holds no best/ yet: the run has not been evaluated; wait for its first evaluation"
        raise ArgumentError.of("run", str(folder), remedy)
    source = f"local-dir:{folder / 'best'}"
    args = run_arguments(source)
    model = load_trained(source, img_size=args.get("img_size")).to(device)
    config = data_config(model, args.get("img_size"))
    size = config["input_size"][1:]
    transform = evaluation_transform(size, config["mean"], config["std"])
    return RunView(folder, args, model, size, transform, device, batch_size)


def redraw_routers(model: nn.Module, seed: int = 0) -> None:
    """Initializes every router again and keeps all other weights: a baseline for what the routers learned.

    Args:
        model: Changed in place.
        seed: Seed of the new weights.
    """
    with seeded_torch(seed):
        for module in model.modules():
            if isinstance(module, Router):
                module.reset_parameters()


def check_run(folder: Path) -> None:
    """Checks that a folder holds a run.

    Raises:
        ArgumentError: It does not.
    """
    if not (folder / "args.yaml").is_file() or not (folder / "results.jsonl").is_file():
        remedy = "holds no args.yaml with results.jsonl; give a folder of finetune.py"
        raise ArgumentError.of("run", str(folder), remedy)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the context, the model is in evaluation mode and computes no gradients; its mode is restored."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
