r"""Converts V-MoE's published checkpoints to a model folder that timm loads.

    timm-moe-dg convert DOWNLOADS/vmoe_b16_imagenet21k_randaug_strong \
        --output output/vmoe_b16
    timm-moe-dg finetune --model local-dir:output/vmoe_b16 --pretrained \
        --dataset PACS --data-dir DATA

The first argument is the common prefix of PREFIX.index, PREFIX.data-00000-of-
00008 and so on. Reading these files needs `pip install 'timm_moe_dg[vmoe]'`.
The layer before the classifier of networks that were not fine-tuned is left
out, as timm has none. The converted network drops no tokens.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import positive_int
from timm_moe_dg.conversion.vmoe import convert_vmoe_arrays, read_vmoe_shards, vmoe_options, vmoe_preprocessing
from timm_moe_dg.errors import ArgumentError, CheckpointError
from timm_moe_dg.hub.folder import fill_from_network
from timm_moe_dg.networks.build import without_origin


def build_parser() -> ToolParser:
    """Returns the command line."""
    parser = tool_parser("convert_vmoe.py", __doc__, "PREFIX --output FOLDER [options]")
    parser.add_argument("prefix", metavar="PREFIX", help="path of the files without .index and .data-...")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder")
    help_ = "experts per token, which the files do not contain (default: %(default)s, as in all published networks)"
    parser.add_argument("--top-k", type=positive_int, default=2, metavar="K", help=help_)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Reads a checkpoint, converts it and writes the folder."""
    args = build_parser().parse_args(argv)
    if args.output.exists():
        raise ArgumentError.of("output", str(args.output), "exists; name a new folder")
    arrays = read_vmoe_shards(args.prefix)
    try:
        options, weights = vmoe_options(arrays, args.top_k), convert_vmoe_arrays(arrays)
    except CheckpointError as error:
        raise CheckpointError(f"prefix={args.prefix!r}: {error}") from error
    with warnings.catch_warnings():
        # Upcycling warns about raw combine weights, but V-MoE was trained with them
        warnings.filterwarnings("ignore", message="top_k=")
        model: Any = timm.create_model(**options)
    model.load_state_dict(weights)
    model.pretrained_cfg = model.default_cfg = without_origin(model.pretrained_cfg) | vmoe_preprocessing(options)
    fill_from_network(args.output, model)
    print(f"{args.prefix}: {options['num_experts']} experts in blocks {options['moe_layers']} of {options['depth']}")
    print(f"model: timm.create_model('local-dir:{args.output}', pretrained=True)")


if __name__ == "__main__":
    main()
