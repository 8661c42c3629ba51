r"""Predicts the classes of image files, as a CSV file.

    timm-moe-dg predict --model output/RUN photographs/
    timm-moe-dg predict --model hf-hub:OWNER/NAME "site/**/*.png" \
        --top-k 3 --output predictions.csv

The columns are path, class, probability, and for --top-k class_2,
probability_2 and so on. A MoGE model uses its shared expert for images
without metadata. Give --metadata a CSV file with the columns path, lon and
lat in degrees, and the further columns that the model was trained with.
Models with location ids take the columns path and location.
"""

import argparse
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import (
    add_device_option,
    add_loader_options,
    add_model_options,
    model_keywords,
    parse_arguments,
)
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.escape import csv_path, one_line
from timm_moe_dg.cli.parser import ToolParser, tool_parser
from timm_moe_dg.cli.values import positive_int
from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.data.readers.image_files import ImageFiles, find_images, image_loader, read_metadata
from timm_moe_dg.errors import ArgumentError, CheckpointError, ImageReadError
from timm_moe_dg.export.engine import Engine, add_engine_option, make_engine
from timm_moe_dg.layers import LocationIdEmbedding
from timm_moe_dg.networks.build import data_config, in_chans_of
from timm_moe_dg.networks.trained import label_names, load_trained, metadata_columns
from timm_moe_dg.storage.atomic import all_or_nothing, write_rows

# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "img_size", "metadata", "skip_unreadable", "batch_size"]
MAIN += ["workers", "device", "top_k", "output", "force"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("predict.py", __doc__, "--model NAME [options] IMAGES ...", main=MAIN, config=True)
    images = "files, folders (searched to any depth) or patterns"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=images)
    add_model_options(parser)
    group = parser.add_argument_group("images")
    add = group.add_argument
    add("--metadata", metavar="CSV", help="places of the images; paths in it are relative to its folder")
    skip = "leave out damaged images, and list them on stderr (default: stop at the first)"
    add("--skip-unreadable", action=argparse.BooleanOptionalAction, default=False, help=skip)
    add_loader_options(group)
    group = parser.add_argument_group("computation")
    add_device_option(group.add_argument)
    add_engine_option(group)
    add = parser.add_argument_group("output").add_argument
    add("--top-k", type=positive_int, default=1, metavar="K", help="classes per image (default: %(default)s)")
    add("--output", metavar="FILE", help="CSV file (default: standard output)")
    add("--force", action=argparse.BooleanOptionalAction, default=False, help="replace an existing file")
    return parser


def metadata_of(network: Any, args: argparse.Namespace, paths: Sequence[str]) -> np.ndarray | None:
    """Reads --metadata in the form that the network takes; None without it."""
    if args.metadata is None:
        return None
    if not hasattr(network, "metadata_encoder"):
        raise ArgumentError.of("metadata", args.metadata, f"{args.model} does not read any; leave it out")
    ids = isinstance(network.metadata_encoder.encoder, LocationIdEmbedding)
    columns = metadata_columns(network)
    metadata = read_metadata(Path(args.metadata), paths, ids, columns)
    missing = np.isnan(metadata)
    unknown = int((metadata < 0 if ids else missing.all(axis=1) if columns else missing.any(axis=1)).sum())
    if unknown:
        print(f"without metadata: {unknown} of {len(paths)} images", file=sys.stderr)
    return metadata


@torch.inference_mode()
def rows_of(network: Any, engine: Engine, images: ImageFiles, args: argparse.Namespace) -> Iterator[list[Any]]:
    """Yields a row for each image that can be decoded."""
    names = label_names(network) or tuple(map(str, range(network.num_classes)))
    loader = image_loader(images, batch_size=args.batch_size, workers=args.workers)
    for batch in tqdm(loader, unit="batch", disable=None):
        if not batch:
            continue
        positions, *inputs = batch
        logits, *_ = engine(*(part.to(args.device) for part in inputs))
        probabilities = logits.float().softmax(dim=1)
        if not probabilities.isfinite().all():
            bad = images.path(int(positions[int((~probabilities.isfinite()).any(dim=1).nonzero()[0])]))
            raise CheckpointError(f"model={args.model!r}: its logits of {bad!r} are NaN; give another checkpoint")
        best = probabilities.topk(args.top_k)
        for position, values, classes in zip(positions.tolist(), *(part.tolist() for part in best), strict=True):
            pairs = zip(classes, values, strict=True)
            cells = (cell for index, value in pairs for cell in (names[index], f"{value:.6f}"))
            yield [images.path(position), *cells]


def write(rows: Sequence[Sequence[Any]], args: argparse.Namespace, file: Any) -> None:
    """Writes the table; paths that are not UTF-8 keep their bytes."""
    others = [f"{name}_{rank}" for rank in range(2, args.top_k + 1) for name in ("class", "probability")]
    columns = ["path", "class", "probability", *others]
    write_rows(file, [columns, *([csv_path(path), *cells] for path, *cells in rows)])


def predict(args: argparse.Namespace) -> list[list[Any]]:
    """Returns the rows of the table."""
    paths = find_images(args.images)
    network = load_trained(args.model, **model_keywords(args)).to(args.device)
    if args.top_k > network.num_classes:
        raise ArgumentError.of("top_k", args.top_k, f"the model has {network.num_classes} classes")
    config = data_config(network, args.img_size)
    engine = make_engine(args, network, config["input_size"])
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    metadata = metadata_of(network, args, paths)
    images = ImageFiles(paths, view, metadata, args.skip_unreadable, in_chans_of(network))
    rows = list(rows_of(network, engine, images, args))
    if len(rows) < len(paths):
        read = {row[0] for row in rows}
        skipped = [path for path in paths if path not in read]
        print(f"unreadable: {len(skipped)} of {len(paths)} images: {one_line(', '.join(skipped))}", file=sys.stderr)
    if not rows:
        raise ImageReadError(f"images={args.images!r}: none can be decoded; repair or remove the files")
    return rows


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    logging.basicConfig(format="%(message)s")
    args = parse_arguments(build_parser(), argv)
    if args.output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="surrogateescape")
        write(predict(args), args, sys.stdout)
        return
    path = Path(args.output)
    with all_or_nothing(path.parent, [path.name], overwrite=args.force) as folder:
        rows = predict(args)
        with (folder / path.name).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            write(rows, args, file)
    print(f"written: {path} ({len(rows)} images)")


if __name__ == "__main__":
    main()
