r"""Predicts the classes of image files, as a CSV file.

    timm-moe-dg predict --model output/RUN photographs/
    timm-moe-dg predict --model hf-hub:OWNER/NAME "site/**/*.png" \
        --top-k 3 --output predictions.csv

The columns are path, class, probability, and for --top-k class_2,
probability_2 and so on. A MoGE model uses its shared expert for images
without metadata. Give --metadata a CSV file with the columns path, lon and
lat in degrees, and the further columns that the model was trained with.
Models with location ids take the columns path and location.

With --window, a georeferenced scene becomes a map of classes and
probabilities:

    timm-moe-dg predict --model output/RUN scene.tif --window 224 \
        --stride 112 --output map.tif
"""

import io
import logging
import sys
from collections.abc import Sequence

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import add_options, from_parsed, parse_arguments
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.parser import ToolParser
from timm_moe_dg.inference.predict import PredictOptions, predict, predict_parser, write_predictions
from timm_moe_dg.inference.scenes import WindowOptions, predict_scene, scene_options


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
    if (scene := scene_options(args)) is not None:
        print("\n".join(f"written: {name}" for name in predict_scene(scene)))
        return
    options = from_parsed(PredictOptions, vars(args), images=args.images)
    rows = predict(options)
    if options.output is not None:
        print(f"written: {options.output} ({len(rows)} images)")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    write_predictions(rows, options.top_k, sys.stdout)


if __name__ == "__main__":
    main()
