"""Classes of image files, as a table with a row for each image."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from ..cli.arguments import LoaderOptions, TrainedModelOptions, add_options, default_device, model_keywords, option
from ..cli.escape import csv_path, one_line
from ..cli.parser import ToolParser, tool_parser
from ..cli.values import positive_int, usable_device
from ..data import file_names
from ..data.domains import FileDomain
from ..data.readers.image_files import ImageFiles, find_images, image_loader, read_metadata
from ..errors import ArgumentError, CheckpointError, ImageReadError
from ..export.engine import EngineOptions, make_engine
from ..layers import LocationIdEmbedding
from ..networks.bands import bands_of
from ..networks.build import Network, data_config, warn_of_other_values
from ..networks.ensemble import evaluation_view, load_predictor
from ..networks.trained import label_names, metadata_columns, unknown_metadata, warn_of_unknown_metadata
from ..storage.atomic import all_or_nothing, write_rows

# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "img_size", "metadata", "skip_unreadable", "batch_size"]
MAIN += ["workers", "device", "top_k", "output", "force"]
_logger = logging.getLogger(__name__)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The reading of images."""

    metadata: str | None = option(None, metavar="CSV",
        help="places of the images; paths in it are relative to its folder")
    skip_unreadable: bool = option(False,
        help="leave out damaged images, and list them on stderr (default: stop at the first)")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that computes."""

    device: str | None = option(None, type=usable_device, metavar="NAME",
        help=f"torch device (default here: {default_device()})")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """The table of predictions."""

    top_k: int = option(1, type=positive_int, metavar="K", help="classes per image (default: %(default)s)")
    output: str | None = option(None, metavar="FILE", help="CSV file (default: standard output)")
    force: bool = option(False, help="replace an existing file")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TrainedModelOptions, ImageOptions, LoaderOptions, DeviceOptions, EngineOptions, TableOptions):
    """All options of a prediction."""

    images: Sequence[str]  # files, folders or patterns
    network: nn.Module | None = None  # in place of that of `model`, whose name is then for messages alone


def predict_parser(description: str | None = None) -> ToolParser:
    """Builds the command line of tools/predict.py."""
    parser = tool_parser("predict.py", description, "--model NAME [options] IMAGES ...", main=MAIN, config=True)
    images = "files, folders (searched to any depth) or patterns"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=images)
    add_options(parser, "model", TrainedModelOptions)
    add_options(parser, "images", ImageOptions, LoaderOptions)
    add_options(parser, "computation", DeviceOptions, EngineOptions)
    add_options(parser, "output", TableOptions)
    return parser


def predict(options: PredictOptions) -> list[list[Any]]:
    """Predicts image files, and writes the table to `options.output` if there is one.

    Returns:
        A row for each image that can be decoded: path, class, probability, and for `top_k` the further classes with
        their probabilities. Probabilities are rounded to six digits, as in the file.
    """
    if options.output is None:
        return _predicted_rows(options)
    path = Path(options.output)
    with all_or_nothing(path.parent, [path.name], overwrite=options.force) as folder:
        rows = _predicted_rows(options)
        with (folder / path.name).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            write_predictions(rows, options.top_k, file)
    return rows


def column_names(top_k: int) -> list[str]:
    """Returns the names of the table's columns."""
    others = [f"{name}_{rank}" for rank in range(2, top_k + 1) for name in ("class", "probability")]
    return ["path", "class", "probability", *others]


def write_predictions(rows: Sequence[Sequence[Any]], top_k: int, file: TextIO) -> None:
    """Writes the table of `predict` as CSV. Paths that are not UTF-8 keep their bytes."""
    cells = [[f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    write_rows(file, [column_names(top_k), *([csv_path(path), *others] for path, *others in cells)])


def _predicted_rows(options: PredictOptions) -> list[list[Any]]:
    paths = find_images(options.images)
    network: Network = options.network or load_predictor(options.model, **model_keywords(options))
    if options.device or not options.network:
        network = network.to(options.device or default_device())
    if options.top_k > network.num_classes:
        raise ArgumentError.of("top_k", options.top_k, f"the model has {network.num_classes} classes")
    view = evaluation_view(network, options.img_size)
    metadata = _read_metadata(network, options, paths)
    bands = bands_of(network)
    images = ImageFiles(paths, view, metadata, options.skip_unreadable, bands)
    warn_of_other_values(network, [FileDomain(options.images[0], (), [0] * len(paths), file_names(paths), bands=bands)])
    rows = list(_predict_batches(network, images, options))
    if len(rows) < len(paths):
        read = {row[0] for row in rows}
        skipped = [path for path in paths if path not in read]
        _logger.warning(f"unreadable: {len(skipped)} of {len(paths)} images: {one_line(', '.join(skipped))}")
    if not rows:
        raise ImageReadError(f"images={options.images!r}: none can be decoded; repair or remove the files")
    return rows


def _read_metadata(network: Network, options: PredictOptions, paths: Sequence[str]) -> np.ndarray | None:
    """Reads the table of metadata in the form that the network takes; None without it."""
    if options.metadata is None:
        warn_of_unknown_metadata(network, len(paths), len(paths), "; give their places with --metadata")
        return None
    if not hasattr(network, "metadata_encoder"):
        raise ArgumentError.of("metadata", options.metadata, f"{options.model} does not read any; leave it out")
    ids = isinstance(network.metadata_encoder.encoder, LocationIdEmbedding)
    columns = metadata_columns(network)
    metadata = read_metadata(Path(options.metadata), paths, ids, columns)
    warn_of_unknown_metadata(network, int(unknown_metadata(metadata, columns).sum()), len(paths))
    return metadata


@torch.inference_mode()
def _predict_batches(network: Network, images: ImageFiles, options: PredictOptions) -> Iterator[list[Any]]:
    """Yields a row for each image that can be decoded."""
    names = label_names(network) or tuple(map(str, range(network.num_classes)))
    engine = make_engine(options, network, data_config(network, options.img_size)["input_size"])
    device = next(network.parameters()).device
    loader = image_loader(images, batch_size=options.batch_size, workers=options.workers)
    for batch in tqdm(loader, unit="batch", disable=None):
        if not batch:
            continue
        positions, *inputs = batch
        logits, *_ = engine(*(part.to(device) for part in inputs))
        probabilities = logits.float().softmax(dim=1)
        if not probabilities.isfinite().all():
            bad = images.path(int(positions[int((~probabilities.isfinite()).any(dim=1).nonzero()[0])]))
            raise CheckpointError(f"model={options.model!r}: its logits of {bad!r} are NaN; give another checkpoint")
        best = probabilities.topk(options.top_k)
        for position, values, classes in zip(positions.tolist(), *(part.tolist() for part in best), strict=True):
            pairs = zip(classes, values, strict=True)
            cells = (cell for index, value in pairs for cell in (names[index], round(value, 6)))
            yield [images.path(position), *cells]
