r"""Predicts the classes of image files, as a CSV file or Parquet files.

    timm-moe-dg predict --model output/RUN photographs/
    timm-moe-dg predict --model hf-hub:OWNER/NAME "site/**/*.png" \
        --top-k 3 --output predictions.csv

The columns are path, class, probability, status, and class_2 for --top-k 2.
A MoGE model uses its shared expert for images without metadata. Give
--metadata a CSV file with the columns path, lon and lat in degrees, and the
further columns of the model. Models with location ids take path and location.

Many images are a list (.csv, .parquet) with these columns, or tar files of
WebDataset. A folder as --output gets Parquet files of any number of processes:

    timm-moe-dg predict --model output/RUN "shards/*.tar" \
        --output parts --shard 3/100

With --window, a georeferenced scene becomes a map of classes:

    timm-moe-dg predict --model output/RUN scene.tif --window 224 \
        --stride 112 --output map.tif
"""

import logging
import sys
from collections.abc import Sequence

from timm_moe_dg.cli.arguments import LoaderOptions, TrainedModelOptions, add_options, from_parsed, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.inference.image_rows import check_images
from timm_moe_dg.inference.predict import ImageOptions, TableOptions, predict, predict_parts
from timm_moe_dg.inference.predictor import CertaintyOptions, ColumnOptions, DeviceOptions, load_model
from timm_moe_dg.inference.scenes import SceneOptions, WindowOptions, has_scene, predict_scene

# What --help shows; --help-all shows every option
MAIN = ["model", "metadata", "top_k", "columns", "coverage", "abstain", "output", "shard", "window"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("predict.py", __doc__, "--model NAME [options] IMAGES ...", main=MAIN, config=True)
    images = "files, folders (searched to any depth), patterns, lists (.csv, .parquet) or .tar files of WebDataset"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=images)
    add_options(parser, "model", TrainedModelOptions)
    add_options(parser, "images", ImageOptions, LoaderOptions)
    add_options(parser, "computation", DeviceOptions)
    add_options(parser, "output", ColumnOptions, CertaintyOptions, TableOptions)
    add_options(parser, "scene", WindowOptions)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    logging.basicConfig(format="%(message)s")
    args = parse_arguments(build_parser(), argv)
    options = from_parsed(SceneOptions, vars(args), images=args.images)
    is_scene = has_scene(options)
    if not is_scene:
        check_images(options.images)
    model = load_model(options)
    if is_scene:
        print("\n".join(f"written: {name}" for name in predict_scene(options, model)))
        return
    if options.folder is not None:
        parts = predict_parts(options, model, options.folder)
        print(f"written: {options.output} ({len(parts.finished())} of {parts.total} parts are finished)")
        return
    count = sum(1 for _ in predict(options, model, None if options.output else sys.stdout))
    if options.output is not None:
        print(f"written: {options.output} ({count} images)")


if __name__ == "__main__":
    main()
