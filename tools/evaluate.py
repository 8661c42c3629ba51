r"""Scores a model by domain: accuracy, macro-F1, calibration and confusions.

    timm-moe-dg evaluate --model output/RUN
    timm-moe-dg evaluate --model hf-hub:OWNER/NAME --dataset folder \
        --data-dir DATA --test-domains sketch

The first command scores a run on its own data and splits. The overall scores
are those of the held-out domains. With --output, tables and pictures are
written to a folder.
"""

import logging
from collections.abc import Sequence

from timm_moe_dg.cli.arguments import LoaderOptions, TrainedModelOptions, add_options, from_parsed, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.finetuning.messages import is_main_rank
from timm_moe_dg.inference.evaluate import (
    EvaluateOptions,
    EvaluationDataOptions,
    EvaluationOutputOptions,
    evaluate,
)

# What --help shows; --help-all shows every option
MAIN = ["model", "pretrained", "initial_checkpoint", "model_kwargs", "dataset", "data_dir", "test_domains"]
MAIN += ["domains", "split", "calibrate", "batch_size", "workers", "output", "save_features", "force"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("evaluate.py", __doc__, "--model NAME [options]", main=MAIN, config=True)
    add_options(parser, "model", TrainedModelOptions)
    place = "data (default for the model of a run: as in that run)"
    add_options(parser, place, EvaluationDataOptions, LoaderOptions)
    add_options(parser, "output", EvaluationOutputOptions)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Scores the model, on all processes."""
    options = from_parsed(EvaluateOptions, vars(parse_arguments(build_parser(), argv)))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("timm_moe_dg").setLevel(logging.INFO if is_main_rank() else logging.ERROR)
    evaluation = evaluate(options)
    if evaluation.is_main_process:
        print(evaluation.text())


if __name__ == "__main__":
    main()
