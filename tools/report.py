r"""Writes an HTML page about a run, or about all runs of a sweep.

    timm-moe-dg report output/RUN
    timm-moe-dg report output/digits --output digits.html

The page is one file. It shows what to expect at a new site, the tables and the
settings. For a run it also shows learning curves, and how the selected network
does on new images. An earlier page is replaced.
"""

from collections.abc import Sequence

from timm_moe_dg.cli.arguments import LoaderOptions, add_device_option, add_options, parse_arguments
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import output_file, positive_int, run_folder
from timm_moe_dg.inference.report import ReportSettings, report

FILE = "report.html"


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("report.py", __doc__, "[options] RUN_OR_SWEEP")
    add = parser.add_argument
    folder = "run folder, or a folder with run folders"
    add("folder", type=run_folder, metavar="RUN_OR_SWEEP", help=folder)
    add("--output", type=output_file, metavar="FILE", help=f"file of the page (default: {FILE} in that folder)")
    add = parser.add_argument_group("the network of a run").add_argument
    add("--data-dir", metavar="DIR", help="folder of the run's images, if it was moved")
    images = "largest number of images per domain (default: %(default)s)"
    add("--max-images", type=positive_int, default=1000, metavar="N", help=images)
    add_device_option(add)
    add_options(parser, "loading of images", LoaderOptions)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = parse_arguments(build_parser(), argv)
    output = args.output or args.folder / FILE
    settings = ReportSettings(args.data_dir, args.device, args.batch_size, args.workers, args.max_images)
    report(args.folder, output, settings)
    print(f"written: {output}")


if __name__ == "__main__":
    main()
