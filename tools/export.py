r"""Exports a model to ONNX and torch.export programs.

    timm-moe-dg export --model output/RUN --output exported
    timm-moe-dg export --model hf-hub:OWNER/NAME --formats onnx \
        --images photographs/ --output exported

Each program is compared with the model on images. If logits differ by more
than --tolerance, nothing is written. preprocessing.json describes inputs and
classes.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

from timm_moe_dg.cli.arguments import TrainedModelOptions, add_options, model_keywords, option, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.data.readers.folders import find_images
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.errors import ArgumentError, needs
from timm_moe_dg.inference.predictor import LoadedModel
from timm_moe_dg.networks.build import data_config
from timm_moe_dg.networks.calibration import find_calibration
from timm_moe_dg.networks.export import (
    FORMATS,
    OPSET,
    Inputs,
    export_model,
    preprocessing,
    sample_metadata,
)
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.files import all_or_nothing
from timm_moe_dg.storage.run_folder import warn_of_unfinished

SAMPLES = 8
PREPROCESSING = "preprocessing.json"


# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "img_size", "model_kwargs", "formats", "images"]
MAIN += ["tolerance", "output", "force"]


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The programs to write."""

    formats: Sequence[str] = option(tuple(FORMATS), nargs="+", choices=tuple(FORMATS), metavar="NAME",
        help=f"formats to write: {', '.join(FORMATS)} (default: all; ONNX has opset {OPSET})")
    images: Sequence[str] | None = option(None, nargs="+", metavar="IMAGES",
        help="files, folders or patterns to compare on (default: scikit-learn's photographs)")
    tolerance: float = option(1e-4, type=float, metavar="X",
        help="largest absolute difference of logits (default: %(default)s)")
    output: str | None = option(None, metavar="DIR", help="folder of the programs (default: print the table only)")
    force: bool = option(False, help="replace existing files")
# fmt: on


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("export.py", __doc__, "--model NAME [options]", main=MAIN, config=True)
    add_options(parser, "model", TrainedModelOptions)
    add_options(parser, "programs", ExportOptions)
    return parser


def photographs() -> list[Image.Image]:
    """Eight views of scikit-learn's two photographs: each turned four times."""
    with needs("export.py without --images", "scikit-learn", "train"):
        from sklearn.datasets import load_sample_images
    whole = map(Image.fromarray, load_sample_images().images)
    return [image.rotate(90 * turns, expand=True) for image in whole for turns in range(4)]


def make_inputs(model: LoadedModel, sources: Sequence[str] | None) -> Inputs:
    """The images to compare on, with random metadata for a model that reads any."""
    if not sources and not model.bands.is_rgb:
        raise ArgumentError.of("images", None, f"the model takes {model.bands.count} bands; give such files")
    images = [read_pixels(path, model.bands) for path in list(find_images(sources))] if sources else photographs()
    # Batches of several sizes are compared, so that a few images are repeated
    images = (images * SAMPLES)[: max(len(images), SAMPLES)]
    metadata = sample_metadata(model.network, len(images))
    return (torch.stack([model.view(image) for image in images]), *([] if metadata is None else [metadata]))


@tool
def main(argv: Sequence[str]) -> None:
    """Loads the model and exports it."""
    logging.basicConfig(format="%(message)s")
    args = parse_arguments(build_parser(), argv)
    names = [*(FORMATS[name].file for name in args.formats), PREPROCESSING]
    place = all_or_nothing(args.output, names, overwrite=args.force) if args.output else TemporaryDirectory()
    with place as folder:
        warn_of_unfinished(args.model)
        network = load_trained(args.model, **model_keywords(args))
        model = LoadedModel(args.model, network, find_calibration(args.model, network), args.img_size)
        inputs = make_inputs(model, args.images)
        with torch.inference_mode():
            largest = network(*inputs).abs().max().item()
        for name in args.formats:
            path, difference = export_model(network, inputs, Path(folder), name, args.tolerance)
            size = f"{path.stat().st_size / 2**20:.1f} MiB"
            print(f"{path.name}: {size}, logits differ by at most {difference:.1e}, the largest is {largest:.2f}")
        temperature = model.calibration.temperature if model.calibration else None
        recipe = preprocessing(network, data_config(network, args.img_size), model.classes, temperature)
        text = json.dumps({"model": args.model, **recipe}, indent=2)
        Path(folder, PREPROCESSING).write_text(f"{text}\n")
    if args.output:
        print(f"written to {args.output}: {', '.join(names)}")


if __name__ == "__main__":
    main()
