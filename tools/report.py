"""Writes an HTML page about a run, or about all runs of a sweep.

    python tools/report.py output/RUN
    python tools/report.py output/digits --output digits.html

The page is one self-contained file. The page of a run has its settings, results by selection rule and learning curves.
It also evaluates the selected network on images that it was not trained on: confusions, calibration, the most confident
mistakes in the worst domain, experts and attention. The page of a sweep compares the rows of its tables with a paired
test. A section that cannot be made gives the reason and a remedy. Pictures need matplotlib, the extra `plots`.
"""

import argparse
from collections.abc import Sequence

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import add_loader_options, tool_parser
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.cli.values import output_file, positive_int, run_folder, usable_device
from timm_moe_dg.report import ReportSettings, report

FILE = "report.html"


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = tool_parser("report.py", __doc__)
    add = parser.add_argument
    folder = "output folder of finetune.py, or a folder with such folders"
    add("folder", type=run_folder, metavar="RUN_OR_SWEEP", help=folder)
    add("--output", type=output_file, metavar="FILE", help=f"file of the page (default: {FILE} in that folder)")
    group = parser.add_argument_group("the network of a run")
    add = group.add_argument
    add("--data-dir", metavar="DIR", help="folder of the run's data, if it was moved (default: the run's --data-dir)")
    images = "largest number of images per domain (default: %(default)s)"
    add("--max-images", type=positive_int, default=1000, metavar="N", help=images)
    add("--device", type=usable_device, default="cpu", help="device of the network (default: %(default)s)")
    add_loader_options(group, workers=0)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    output = args.output or args.folder / FILE
    settings = ReportSettings(args.data_dir, args.device, args.batch_size, args.workers, args.max_images)
    report(args.folder, output, settings)
    print(f"written: {output}")


if __name__ == "__main__":
    main()
