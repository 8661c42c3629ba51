"""Trained runs, opened for analysis: network, data, the transform between them, and images chosen to be drawn."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data import (
    BENCHMARKS,
    Domain,
    EvaluationImages,
    FolderDomain,
    drop_unreadable,
    evaluation_loader,
    evaluation_transform,
    get_benchmark,
)
from ..data.bands import Bands
from ..data.inspection import FILES, difference, fingerprint
from ..data.loaders import seeded_torch
from ..data.readers.folders import find_images
from ..data.readers.images import Pixels, Transform, as_picture, read_pixels
from ..data.splits import hold_out
from ..errors import ArgumentError, DataError
from ..layers.router import Router
from ..networks.bands import bands_of
from ..networks.build import Network, data_config, refuse_ensemble
from ..networks.trained import load_trained, takes_metadata
from ..storage.run_folder import run_arguments

MAX_SIDE = 224  # pixels; larger photographs are reduced, so that files stay small
Batch = tuple[Tensor, ...]  # images (B, C, H, W), and metadata (B, ...) if the network takes it


@dataclass(frozen=True)
class RunView:
    """A run, opened for analysis."""

    folder: Path
    args: dict[str, Any]
    model: Network  # the selected network, in evaluation mode
    size: tuple[int, int]  # height and width of the network's input, pixels
    transform: Transform  # maps an image to the network's input
    device: str
    batch_size: int  # images per forward pass
    shares_photographs: bool  # whether files with the same CLASS/IMAGE show the same photograph in all domains
    data_dir: str | None  # folder of the images, instead of the run's own

    @property
    def name(self) -> str:
        """The model's registered name."""
        return str(self.args.get("model", type(self.model).__name__))

    @property
    def columns(self) -> Sequence[str]:
        """Columns of metadata.csv that the network takes in addition to coordinates."""
        return self.args.get("metadata_columns") or ()

    @property
    def bands(self) -> Bands:
        """The bands of the network's input."""
        return bands_of(self.model)

    @cached_property
    def domains(self) -> Sequence[Domain]:
        """The run's data. Other data are a `DataError`."""
        folder, read = self.data_dir or self.args.get("data_dir"), get_benchmark(self.args["dataset"]).read
        domains = read(folder, self.columns, self.bands, evaluating=True, columns=self.args.get("columns"))
        digests = self.args.get("domain_digests")
        if digests and (reason := difference(digests, fingerprint(domains), FILES)):
            remedy = "give --data-dir, the folder of the run's data"
            raise DataError(f"data_dir={folder!r}: is not the data that the run was trained on: {reason}; {remedy}")
        domains = hold_out(domains, self.args["test_domains"])
        return drop_unreadable(domains)[0] if self.args.get("skip_unreadable") else domains

    def batches(self, images: Iterable[tuple[Pixels, Tensor | None]]) -> Iterator[Batch]:
        """Yields inputs of the network for images with their metadata, in order."""
        remaining = iter(images)
        while part := list(islice(remaining, self.batch_size)):
            inputs = self.inputs([pixels for pixels, _ in part])
            rows = [metadata for _, metadata in part if metadata is not None]
            yield (inputs, torch.stack(rows).to(self.device)) if rows else (inputs,)

    def evaluation_batches(self, images: EvaluationImages, workers: int = 0) -> Iterator[list[Tensor]]:
        """Yields images, targets, groups and possibly metadata on the device."""
        for batch in evaluation_loader(images, batch_size=self.batch_size, workers=workers):
            yield [part.to(self.device) for part in batch]

    def metadata(self, domain: Domain, position: int) -> Tensor | None:
        """An image's metadata on CPU; None if the network takes none."""
        if domain.metadata is None or not takes_metadata(self.model, [domain], self.columns):
            return None
        return torch.as_tensor(domain.metadata[position])

    def inputs(self, images: Sequence[Pixels]) -> Tensor:
        """Transforms images from `Domain.pixels` -> (B, channels, height, width) on the device."""
        return torch.stack([self.transform(image) for image in images]).to(self.device)


def open_run(
    folder: Path,
    device: str = "cpu",
    batch_size: int = 64,
    split_by_photograph: bool | None = None,
    data_dir: str | None = None,
) -> RunView:
    """Opens a folder of finetune.py that holds a selected network.

    Images that cannot be decoded are skipped if the run did so. By default photographs are shared by domains if the run
    was split by them, or if the benchmark says so. `data_dir` is the folder of the images if they were moved.
    """
    check_run(folder)
    best = folder / "best"
    refuse_ensemble(best)
    if not (best / "model.safetensors").is_file():
        raise ArgumentError.of("run", str(folder), "holds no network in best/: wait for the run's first evaluation")
    source = f"local-dir:{best}"
    args = run_arguments(source)
    model = load_trained(source, img_size=args.get("img_size")).to(device)
    config = data_config(model, args.get("img_size"))
    size = config["input_size"][1:]
    transform = evaluation_transform(size, config["mean"], config["std"])
    if split_by_photograph is None:
        benchmark = BENCHMARKS.get(args.get("dataset", ""))
        split_by_photograph = bool(args.get("split_by_photograph") or (benchmark and benchmark.shares_photographs))
    return RunView(folder, args, model, size, transform, device, batch_size, split_by_photograph, data_dir)


def redraw_routers(model: nn.Module) -> None:
    """Initializes every router of a model again, in place, as a baseline for what the routers learned."""
    with seeded_torch(0):
        for module in model.modules():
            if isinstance(module, Router):
                module.reset_parameters()


def check_run(folder: Path) -> None:
    """Checks that a folder holds a run."""
    if not (folder / "args.yaml").is_file() or not (folder / "results.jsonl").is_file():
        remedy = "holds no args.yaml with results.jsonl; give a folder of finetune.py"
        raise ArgumentError.of("run", str(folder), remedy)


class ChosenImage(NamedTuple):
    """One image to draw."""

    name: str  # label of the image
    image: Pixels  # as read
    metadata: Tensor | None  # (...) the network's metadata input; None if it takes none


ImageRows = list[tuple[str, list[ChosenImage | None]]]  # name of the row, and its images; None for a missing one


def choose_images(view: RunView, files: Sequence[str] | None, target: str | None, columns: int) -> ImageRows:
    """Chooses a class's pictures, by default the first's, from the run or from `files`: a row for each domain."""
    if files is not None:
        return _files(view, files, columns)
    domains, rows = view.domains, list[tuple[str, list[ChosenImage | None]]]()
    chosen = choose_pictures(domains, class_index(domains, target), columns, view.shares_photographs)
    for domain, row in zip(domains, chosen, strict=True):
        images = [None if position is None else _read(view, domain, position) for position in row]
        rows.append((domain.name, images))
    return rows


def _files(view: RunView, images: Sequence[str], columns: int) -> ImageRows:
    if hasattr(view.model, "metadata_encoder"):
        remedy = "the model routes by coordinates, which files do not have; leave out --images"
        raise ArgumentError.of("images", list(images), remedy)
    paths = list(find_images(images))
    chosen: list[ChosenImage | None] = [
        ChosenImage(Path(path).name, read_pixels(path, view.bands), None) for path in paths
    ]
    width = min(columns, len(chosen))
    chosen += [None] * (-len(chosen) % width)
    return [("", chosen[start : start + width]) for start in range(0, len(chosen), width)]


def _read(view: RunView, domain: Domain, position: int) -> ChosenImage:
    names = picture_names(domain, by_path=True)
    name = names[position].rpartition("/")[2] if names else f"image {position}"
    return ChosenImage(name, domain.pixels(position), view.metadata(domain, position))


def picture_key(path: str) -> str:
    """CLASS/IMAGE of a file without its extension, which copies of a picture in several domains share."""
    return f"{Path(path).parent.name}/{Path(path).stem}"


def picture_names(domain: Domain, by_path: bool) -> list[str] | None:
    """Names of a domain's images, under which other domains have the same picture; None if it has no such names.

    Equal file names mean nothing in general, such as 001.jpg in each hospital. `by_path` says that they do here.
    """
    if domain.pictures is not None:
        return list(domain.pictures)
    return [picture_key(path) for path in domain.paths] if by_path and isinstance(domain, FolderDomain) else None


def class_index(domains: Sequence[Domain], name: str | None) -> int:
    """The index of a class; 0 for None."""
    classes = domains[0].classes
    if name is not None and name not in classes:
        raise DataError(f"class={name!r}: no such class; choose from {', '.join(classes)}")
    return 0 if name is None else classes.index(name)


def choose_pictures(
    domains: Sequence[Domain], target: int, number: int, by_path: bool = False
) -> list[list[int | None]]:
    """Chooses images of a class, a row for each domain, the same picture in the same column.

    Pictures that more domains share come first. If domains share no picture, each row has images of its own. The
    result holds positions in each domain, None for a picture that the domain lacks.
    """
    candidates = [[index for index, label in enumerate(domain.targets) if label == target] for domain in domains]
    if not any(candidates):
        raise DataError(f"class={domains[0].classes[target]!r}: no domain has an image of it; name another class")
    names = [picture_names(domain, by_path) for domain in domains]
    by_name = [
        {domain_names[index]: index for index in rows}
        for domain_names, rows in zip(names, candidates, strict=True)
        if domain_names is not None
    ]
    counts = Counter(name for index_of in by_name for name in index_of)
    if len(by_name) < len(domains) or max(counts.values()) < 2:
        width = min(number, max(map(len, candidates)))
        return [[*rows[:width], *([None] * (width - len(rows)))] for rows in candidates]
    columns = [name for name, _ in counts.most_common(number)]
    return [[index_of.get(name) for name in columns] for index_of in by_name]


def small_pixels(image: Pixels) -> np.ndarray:
    """uint8 (height, width, 3), reduced to `MAX_SIDE` if larger."""
    small = as_picture(image) if isinstance(image, Tensor) else image.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(small)
