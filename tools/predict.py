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

from timm_moe_dg.cli.arguments import add_options, from_parsed, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool
from timm_moe_dg.inference.image_rows import check_images
from timm_moe_dg.inference.predict import predict, predict_parser, predict_parts
from timm_moe_dg.inference.predictor import load_model
from timm_moe_dg.inference.scenes import SceneOptions, WindowOptions, has_scene, predict_scene


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = predict_parser(__doc__)
    add_options(parser, "scene", WindowOptions)
    parser.main = [*parser.main, "window"]
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
