"""Makes tables of finished runs, by selection rule, with mean and standard error over trial seeds.

    python tools/collect_results.py output/digits
    python tools/collect_results.py output/digits --format markdown --plot accuracies.png
    python tools/collect_results.py output/digits --compare gmoe_tiny_patch16 deit_tiny_patch16_224

Runs are found anywhere below the folders, among them those that DomainBed wrote. Numbers are percent; a run that is
missing is named below its table, and runs without a `done` file are left out.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from timm_moe_dg.analysis.plots import plot_accuracies
from timm_moe_dg.cli.arguments import parse_words
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.selection import reported_accuracy, whole_accuracy
from timm_moe_dg.results.columns import OPTIONAL_COLUMNS
from timm_moe_dg.results.comparison import compare
from timm_moe_dg.results.rendering import RENDERERS, render
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import NEEDED, make_tables


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="collect_results.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="DIR", help="folders that hold runs")
    rules = f"of {', '.join(NEEDED)} (default: those that there are runs for)"
    add("--rules", nargs="+", choices=NEEDED, default=list(NEEDED), metavar="RULE", help=rules)
    add("--format", choices=RENDERERS, default="text", help="(default: %(default)s)")
    whole = "report the test domain's two splits together rather than its in-split, which is what DomainBed reports"
    add("--whole-domain", action="store_true", help=whole)
    further = f"further columns, of {', '.join(OPTIONAL_COLUMNS)}: accuracy on training domains' or held-out out-splits"
    add("--columns", nargs="+", choices=OPTIONAL_COLUMNS, default=[], metavar="NAME", help=further)
    pair = "put two rows side by side, with their difference and the papers' figures: models, algorithms, or folders"
    add("--compare", nargs=2, metavar=("A", "B"), help=pair)
    add("--plot", type=Path, metavar="PNG", help="draw the tables as bars with standard errors (needs matplotlib)")
    return parser


def collect(args: argparse.Namespace) -> None:
    """Reads the runs and shows their tables."""
    runs, unfinished = find_runs(args.folders)
    if not runs:
        raise RecordError(f"folders={args.folders}: hold no finished runs, and {len(unfinished)} that are not finished")
    report = whole_accuracy if args.whole_domain else reported_accuracy
    tables = make_tables(runs, args.rules, report, [OPTIONAL_COLUMNS[name] for name in args.columns])
    print(f"{len(runs)} finished runs", file=sys.stderr)
    if args.compare:
        first, second = args.compare
        print(compare(tables, first, second, args.format))
    else:
        print("\n\n".join(render(table, args.format) for table in tables))
    for folder in unfinished:
        print(f"not finished, left out: {folder}", file=sys.stderr)
    if args.plot:
        plot_accuracies(tables, args.plot)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    collect(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
