"""Classes of images, as a table with a row for each image: one CSV file, or a folder of Parquet files."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from torch import nn

from ..cli.arguments import LoaderOptions, TrainedModelOptions, add_options, option
from ..cli.text import csv_path
from ..cli.tool import ToolParser, tool_parser
from ..cli.values import positive_int, shard_text
from ..data.readers.csv_tables import Metadata
from ..errors import ArgumentError, DataError, ImageReadError
from ..networks.trained import network_digest
from ..storage.files import all_or_nothing, write_rows
from .certainty import CertaintyOptions, certainty_columns
from .image_rows import ImageRow, MetadataNames, chunks, image_rows
from .parts import PartFolder, Shard, check_folder
from .predictor import STATUS, ColumnOptions, DeviceOptions, PartOptions, Predictor, class_columns

# What --help shows; --help-all shows every option
MAIN = ["model", "metadata", "top_k", "columns", "coverage", "abstain", "output", "shard"]


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The metadata of images."""

    metadata: str | None = option(None, metavar="CSV",
        help="places of the images; paths in it are relative to its folder")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Where the table of predictions goes."""

    output: str | None = option(None, metavar="PATH",
        help="FILE.csv, or a folder of Parquet files, with which the same command goes on (default: standard output)")
    force: bool = option(False, help="replace an existing file")
    part_size: int = option(10_000, type=positive_int, help="images per Parquet file (default: %(default)s)")
    shard: str | None = option(None, type=shard_text, metavar="I/N",
        help="predict share I, from 0 to N - 1, of a folder's files; other machines predict the others")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PartOptions, ImageOptions, TableOptions):
    """All options of a prediction."""

    images: Sequence[str]  # files, folders or patterns
    network: nn.Module | None = None  # in place of that of `model`, whose name is then for messages alone

    @property
    def folder(self) -> Path | None:
        """The folder of parts, if `output` names one."""
        if self.output is None:
            return None
        path = Path(self.output)
        return path if path.is_dir() or not path.suffix or self.output.endswith(os.sep) else None


def predict_parser(description: str | None = None) -> ToolParser:
    """Builds the command line of tools/predict.py."""
    parser = tool_parser("predict.py", description, "--model NAME [options] IMAGES ...", main=MAIN, config=True)
    images = "files, folders (searched to any depth), patterns, lists (.csv, .parquet) or .tar files of WebDataset"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=images)
    add_options(parser, "model", TrainedModelOptions)
    add_options(parser, "images", ImageOptions, LoaderOptions)
    add_options(parser, "computation", DeviceOptions)
    add_options(parser, "output", ColumnOptions, CertaintyOptions, TableOptions)
    return parser


def predict(options: PredictOptions, file: TextIO | None = None) -> Iterator[list[Any]]:
    """Predicts images, and writes the table as CSV to `options.output`, or to an open file, as it goes.

    Yields:
        A row for each image, with the columns of `column_names`. Probabilities are rounded to six digits, as in the
        file. Logits and other lists are cells. An image that cannot be decoded has None for its answer.

    Raises:
        ImageReadError: No image can be decoded.
    """
    if Shard.of(options.shard, os.environ).step > 1:
        remedy = "one process writes a table; several write a folder of parts: --output FOLDER"
        raise ArgumentError.of("output", options.output, remedy)
    names, is_first, can_read = column_names(options), True, False
    with _csv_file(options) if options.output else nullcontext(file) as opened:
        predictor, parts = _opened(options)
        for part in predictor.parts(enumerate(parts)):
            columns = (part.table[name] for name in names)
            values = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
            rows = list(map(list, zip(*values, strict=True)))
            if opened is not None and rows:
                cells = [[csv_path(path), *map(_cell, others)] for path, *others in rows]
                write_rows(opened, [names, *cells] if is_first else cells)
                opened.flush()
            yield from rows
            is_first &= not rows
            can_read |= len(part.unreadable) < part.images
    if not can_read:
        raise ImageReadError(f"images={options.images!r}: none can be decoded; repair or remove the files")


def predict_parts(options: PredictOptions, folder: Path) -> PartFolder:
    """Predicts the unfinished parts of this process into a folder, which is returned."""
    check_folder(folder)
    if options.force:
        raise ArgumentError.of("force", True, "parts are never replaced; remove the folder, or choose another")
    predictor, parts = _opened(options)
    job = {
        "model": network_digest(predictor.network)[:16],
        "classes": sha256(repr(predictor.classes).encode()).hexdigest()[:16],
        "images": list(options.images),
        "metadata": options.metadata,
        "img_size": options.img_size,
        "part_size": options.part_size,
        "columns": predictor.columns,
        "skip_unreadable": options.skip_unreadable,
        "temperature": predictor.temperature,
        "certainty": predictor.certainty.settings,
    }
    target, shard = PartFolder(folder, job), Shard.of(options.shard, os.environ)
    for part in predictor.parts(target.unfinished(parts, shard)):
        target.write(part)
    target.check_complete(shard)
    return target


def column_names(options: PartOptions) -> list[str]:
    """Returns the names of the columns of `predict`."""
    answer = [*class_columns(options.top_k), STATUS, *certainty_columns(options)]
    return ["path", *answer, *dict.fromkeys(options.columns)]


def _opened(options: PredictOptions) -> tuple[Predictor, Iterator[list[ImageRow]]]:
    """The network, and the images of all parts."""
    for source in options.images:  # before the network is loaded, and before any image is predicted
        if next(image_rows([source], MetadataNames()), None) is None:
            raise DataError(f"images={source!r}: holds no image; leave it out")
    predictor = Predictor(options, options.network)
    rows = image_rows(options.images, predictor.names)
    if options.metadata is not None:
        if not predictor.reads_metadata:
            raise ArgumentError.of("metadata", options.metadata, f"{options.model} does not read any; leave it out")
        table = Metadata(Path(options.metadata), *predictor.names)
        table.check(row.path for row in image_rows(options.images, predictor.names))
        rows = (row._replace(metadata=table.of(row.path) or row.metadata) for row in rows)
    return predictor, chunks(rows, options.part_size)


@contextmanager
def _csv_file(options: PredictOptions) -> Iterator[TextIO]:
    path = Path(str(options.output))
    with (
        all_or_nothing(path.parent, [path.name], overwrite=options.force) as folder,
        (folder / path.name).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        yield file


def _cell(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "|".join(value)
    if isinstance(value, list):
        return json.dumps([round(number, 6) for number in value])
    return f"{value:.6f}" if isinstance(value, float) else value
