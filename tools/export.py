r"""Exports a model to ONNX and torch.export programs.

    timm-moe-dg export --model output/RUN --output exported
    timm-moe-dg export --model hf-hub:OWNER/NAME --formats onnx \
        --images photographs/ --output exported

Each program is compared with the model on images. If logits differ by more
than --tolerance, nothing is written. The printed table has sizes, differences
and times on CPU. preprocessing.json describes inputs and classes.
"""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis.cost import interleaved, ratios, seconds_of
from timm_moe_dg.cli.arguments import TrainedModelOptions, add_options, model_keywords, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import positive_int
from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.data.readers.folders import find_images
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.errors import ArgumentError, needs
from timm_moe_dg.networks.bands import bands_of
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.calibration import find_calibration
from timm_moe_dg.networks.export import (
    FORMATS,
    OPSET,
    Exported,
    Inputs,
    export_model,
    preprocessing,
    sample_metadata,
)
from timm_moe_dg.networks.trained import label_names, load_trained
from timm_moe_dg.storage.files import all_or_nothing
from timm_moe_dg.storage.run_folder import warn_of_unfinished

SAMPLES = 8
PREPROCESSING = "preprocessing.json"


# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "img_size", "model_kwargs", "formats", "images"]
MAIN += ["tolerance", "output", "force"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("export.py", __doc__, "--model NAME [options]", main=MAIN, config=True)
    add_options(parser, "model", TrainedModelOptions)
    add = parser.add_argument_group("programs").add_argument
    formats = f"formats to write: {', '.join(FORMATS)} (default: all; ONNX has opset {OPSET})"
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="NAME", help=formats)
    images = "files, folders or patterns to compare on (default: scikit-learn's photographs)"
    add("--images", nargs="+", metavar="IMAGES", help=images)
    tolerance = "largest absolute difference of logits (default: %(default)s)"
    add("--tolerance", type=float, default=1e-4, metavar="X", help=tolerance)
    add = parser.add_argument_group("report").add_argument
    add("--rounds", type=positive_int, default=20, metavar="N", help="timed rounds (default: %(default)s)")
    sizes = "images per timed forward pass (default: 1 8)"
    add("--batch-size", type=positive_int, nargs="+", default=[1, 8], metavar="N", help=sizes)
    threads = torch.get_num_threads()
    add("--cpu-threads", type=positive_int, default=threads, metavar="N", help="CPU threads (default: %(default)s)")
    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="DIR", help="folder of the programs (default: print the table only)")
    add("--force", action=argparse.BooleanOptionalAction, default=False, help="replace existing files")
    return parser


def photographs() -> list[Image.Image]:
    """Eight views of scikit-learn's two photographs: each turned four times."""
    with needs("export.py without --images", "scikit-learn", "train"):
        from sklearn.datasets import load_sample_images
    whole = map(Image.fromarray, load_sample_images().images)
    return [image.rotate(90 * turns, expand=True) for image in whole for turns in range(4)]


def make_inputs(model: nn.Module, config: Mapping[str, Any], sources: Sequence[str] | None) -> Inputs:
    """The images to compare on, with random metadata for a model that reads any."""
    bands = bands_of(model)
    if not sources and not bands.is_rgb:
        raise ArgumentError.of("images", None, f"the model takes {config['input_size'][0]} bands; give such files")
    images = [read_pixels(path, bands) for path in find_images(sources)] if sources else photographs()
    # Batches of several sizes are compared, so that a few images are repeated
    images = (images * SAMPLES)[: max(len(images), SAMPLES)]
    view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    metadata = sample_metadata(model, len(images))
    return (torch.stack([view(image) for image in images]), *([] if metadata is None else [metadata]))


def report(args: argparse.Namespace, model: nn.Module, programs: Mapping[str, Exported], inputs: Inputs) -> None:
    """Prints the table in Markdown, one row for the model and one for each program."""
    callables = {"eager": model} | {name: exported.program for name, exported in programs.items()}
    batches = [tuple(torch.cat([part] * -(-size // len(part)))[:size] for part in inputs) for size in args.batch_size]
    with torch.inference_mode():
        calls = [{name: partial(seconds_of, partial(f, *batch)) for name, f in callables.items()} for batch in batches]
        seconds = [interleaved(of_batch, args.rounds, warmup=2) for of_batch in calls]
        largest = model(*inputs).abs().max().item()
    heads = [f"ms, batch {size}" for size in args.batch_size]
    print(f"| model | format | MiB | largest difference | {' | '.join(heads)} |")
    print(f"|---|---|---|---|{'---|' * len(heads)}")
    for name in callables:
        weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
        bytes_ = programs[name].path.stat().st_size if name in programs else weights
        difference = f"{programs[name].difference:.1e}" if name in programs else f"(largest logit {largest:.2f})"
        times = [f"{median(of[name]) * 1e3:.1f} ({median(ratios(of[name], of['eager'])):.2f})" for of in seconds]
        print(f"| {args.model} | {name} | {bytes_ / 2**20:.1f} | {difference} | {' | '.join(times)} |", flush=True)


@tool
def main(argv: Sequence[str]) -> None:
    """Loads the model, exports it and prints the table."""
    logging.basicConfig(format="%(message)s")
    args = parse_arguments(build_parser(), argv)
    torch.set_num_threads(args.cpu_threads)
    names = [*(FORMATS[name].file for name in args.formats), PREPROCESSING]
    place = all_or_nothing(args.output, names, overwrite=args.force) if args.output else TemporaryDirectory()
    with place as work:
        folder = Path(work)
        warn_of_unfinished(args.model)
        model = load_trained(args.model, **model_keywords(args))
        config = data_config(model, args.img_size)
        inputs = make_inputs(model, config, args.images)
        programs = {name: export_model(model, inputs, folder, name, args.tolerance) for name in args.formats}
        classes = label_names(model) or tuple(map(str, range(model.num_classes)))
        calibration = find_calibration(args.model, model)
        temperature = calibration.temperature if calibration else None
        described = {"model": args.model, **preprocessing(model, config, classes, temperature)}
        (folder / PREPROCESSING).write_text(json.dumps(described, indent=2) + "\n")
        report(args, model, programs, inputs)
    if args.output:
        print(f"written to {args.output}: {', '.join(names)}")


if __name__ == "__main__":
    main()
