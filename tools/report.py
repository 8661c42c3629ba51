"""Writes one page of HTML about a run, or about all runs of a sweep, to look at, print, or pass on.

    python tools/report.py output/RUN
    python tools/report.py output/digits --output digits.html

The page is a single file: pictures are in it, nothing is loaded from elsewhere. Of a run it shows what was run, tables
by selection rule, learning curves, and what the selected network does with images that it was not trained on:
confusions, calibration, the worst domain with its surest mistakes, experts, attention. Of a sweep it compares the rows,
seed by seed, with a paired test. What cannot be shown is named, with what would help. Pictures need matplotlib, the
extra `plots`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.cli.arguments import non_negative_int, output_file, positive_int, usable_device
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.report import Reading, report

FILE = "report.html"


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "folder", type=Path, metavar="RUN_OR_SWEEP", help="output folder of finetune.py, or one that holds such folders"
    )
    add("--output", type=output_file, metavar="FILE", help=f"the page (default: {FILE} in that folder)")
    add = parser.add_argument_group("the network of a run").add_argument
    add("--data-dir", metavar="DIR", help="where the run's data lies now (default: where it lay)")
    add("--max-images", type=positive_int, default=1000, metavar="N", help="of each domain (default: %(default)s)")
    add("--device", type=usable_device, default="cpu", help="where the model runs (default: %(default)s)")
    add("-b", "--batch-size", type=positive_int, default=64, metavar="N", help="images (default: %(default)s)")
    workers = "loader processes; 0 for none (default: %(default)s)"
    add("-j", "--workers", type=non_negative_int, default=0, metavar="N", help=workers)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    output = args.output or args.folder / FILE
    reading = Reading(args.data_dir, args.device, args.batch_size, args.workers, args.max_images)
    report(args.folder, output, reading)
    print(f"written: {output}")


if __name__ == "__main__":
    main()
