r"""Serves a page on which people try a model in their browser.

    timm-moe-dg demo output/RUN
    timm-moe-dg demo hf-hub:OWNER/NAME --port 8000

You drop an image, click its place if the model reads places, and see what
predict answers. The page is for this machine alone unless you give --host.
"""

import logging
from collections.abc import Sequence

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import model_source, positive_int
from timm_moe_dg.inference.demo import serve


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("demo.py", __doc__, "MODEL [options]")
    add = parser.add_argument
    add("model", type=model_source, metavar="MODEL", help="run folder, hf-hub:OWNER/NAME or local-dir:FOLDER")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is for every machine (default: %(default)s)")
    add("--port", type=positive_int, default=7860, metavar="N", help="port to listen on (default: %(default)s)")
    add_device_option(add)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    serve(args.model, args.device, args.host, args.port)


if __name__ == "__main__":
    main()
