r"""Prints tables of finished runs by selection rule.

    timm-moe-dg tables output/digits
    timm-moe-dg tables output/gmoe_small --papers
    timm-moe-dg tables output/digits --new-site
    timm-moe-dg tables output/digits --format markdown --plot accuracies.png
    timm-moe-dg tables output/digits \
        --compare gmoe_tiny_patch16 deit_tiny_patch16_224

Numbers are percent, with mean and standard error over trial seeds. Unfinished
runs are left out, and missing runs are listed. Runs of DomainBed are read too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from timm_moe_dg.analysis.plots import plot_ablation, plot_accuracies
from timm_moe_dg.cli.text import one_line
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import run_folder
from timm_moe_dg.errors import ArgumentError, RecordError
from timm_moe_dg.protocols.selection import reported_accuracy, whole_accuracy
from timm_moe_dg.results.comparison import FORMATS, compare, data_frame, data_text, render, with_improvements
from timm_moe_dg.results.new_site import new_site, render_site, site_frame
from timm_moe_dg.results.papers import why_no_figures
from timm_moe_dg.results.runs import FinishedRun, find_runs
from timm_moe_dg.results.tables import (
    OFFICIAL_RULES,
    OPTIONAL_COLUMNS,
    RULES,
    SINGLE_SOURCE,
    Table,
    is_tabled,
    make_tables,
    why_no_table,
)

DATA_FORMATS = ("csv", "json")  # for other programs


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("collect_results.py", __doc__, "[options] DIR ...")
    add = parser.add_argument
    add("folders", nargs="+", type=run_folder, metavar="DIR", help="folders with runs, searched at any depth")
    site = "print the accuracy to expect at a new site in place of tables: interval, worst domain, best model"
    add("--new-site", action="store_true", help=site)
    rules = f"selection rules, of {', '.join(RULES)} (default: all that the runs have results for)"
    add("--rules", nargs="+", choices=RULES, metavar="RULE", help=rules)
    formats = [*FORMATS, *DATA_FORMATS]
    add("--format", choices=formats, default="text", help="format of the tables (default: %(default)s)")
    whole = "report accuracy over both splits of the test domain (default: over its in-split, as in DomainBed)"
    add("--whole-domain", action="store_true", help=whole)
    names = ", ".join(OPTIONAL_COLUMNS)
    further = f"additional columns, of {names}: mean accuracy on the out-splits of training or held-out domains, and "
    further += "scores on the in-splits of held-out domains"
    add("--columns", nargs="+", choices=OPTIONAL_COLUMNS, default=[], metavar="NAME", help=further)
    add("--groups", action="store_true", help="add a column for every group, for data with its own test domains")
    relative = "add the relative improvement over this row, named by model, algorithm, variant or folder"
    add("--relative-to", metavar="ROW", help=relative)
    pair = "print two rows side by side with their difference and the papers' figures (rows are named as above)"
    add("--compare", nargs=2, metavar=("A", "B"), help=pair)
    add("--papers", action="store_true", help="set the papers' figures beside the columns, for runs of their recipes")
    add("--plot", type=Path, metavar="PNG", help="draw the tables as bars with standard errors (needs matplotlib)")
    ablation = "draw a column of the first table against a setting that differs between its rows, such as top_k"
    add("--ablation", nargs=3, metavar=("SETTING", "COLUMN", "PNG"), help=ablation)
    return parser


def write_data(tables: Sequence[Table], format_: str, papers: bool) -> None:
    """Prints the tables' cells for other programs."""
    print(data_text(data_frame(tables, papers), format_), end="")
    for table in tables:
        for phrase in table.missing:
            print(one_line(f"missing in {table.title}: {phrase}"), file=sys.stderr)


def print_new_site(args: argparse.Namespace, parser: ToolParser, runs: Sequence[FinishedRun]) -> None:
    """Prints the accuracy to expect at a new site."""
    for name, value in vars(args).items():
        if name not in ("folders", "format", "imports", "new_site") and value != parser.get_default(name):
            raise ArgumentError.of(name, value, "has no effect beside --new-site; leave one of them out")
    site = new_site(runs)
    data = args.format in DATA_FORMATS
    print(data_text(site_frame(site), args.format) if data else f"{render_site(site, args.format)}\n", end="")


@tool
def main(argv: Sequence[str]) -> None:
    """Reads the runs and prints their tables."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.compare and args.format in DATA_FORMATS:
        raise ArgumentError.of("format", args.format, f"--compare has {', '.join(FORMATS)}; choose one of them")
    if args.compare and args.relative_to:
        raise ArgumentError.of("relative_to", args.relative_to, "has no effect beside --compare; leave one of them out")
    runs, unfinished = find_runs(args.folders)
    if not runs:
        raise RecordError(
            f"folders={args.folders}: no finished runs, {len(unfinished)} unfinished; wait, or give other folders"
        )
    print(f"{len(runs)} finished runs", file=sys.stderr)
    for folder in (run.folder for run in runs if not run.test_domains):
        print(f"holds out no domain, left out: {one_line(folder)}", file=sys.stderr)
    for folder in unfinished:
        print(f"not finished, left out: {one_line(folder)}", file=sys.stderr)
    if args.new_site:
        print_new_site(args, parser, runs)
        return
    report = whole_accuracy if args.whole_domain else reported_accuracy
    further = [OPTIONAL_COLUMNS[name] for name in args.columns]
    tables = make_tables(runs, args.rules or list(RULES), report, further, by_group=args.groups)
    without_table = [rule for rule in args.rules or () if rule not in {table.rule for table in tables}]
    reasons = [f"{rule}: {why_no_table(rule, runs)}" for rule in without_table]
    if not tables:
        raise RecordError("; ".join(reasons) or "rules: no rule has all of its runs; see sweep --status")
    if args.whole_domain:
        others = [table.title for table in tables if table.rule in (SINGLE_SOURCE, *OFFICIAL_RULES)]
        reasons += [f"--whole-domain has no effect on: {title}" for title in others]
    for reason in reasons:
        print(one_line(reason), file=sys.stderr)
    for run in () if args.rules else runs:
        if run.test_domains and not is_tabled(run, tables):
            print(f"holds out {len(run.test_domains)} domains, in no table: {one_line(run.folder)}", file=sys.stderr)
    if args.compare:
        first, second = args.compare
        print(compare(tables, first, second, args.format))
    else:
        printed = tables
        if args.relative_to:
            printed = [with_improvements(table, args.relative_to) for table in tables if table.runs]
        if args.format in DATA_FORMATS:
            write_data(printed, args.format, args.papers)
        else:
            print("\n\n".join(render(table, args.format, args.papers) for table in printed))
    for reason in why_no_figures(tables) if args.papers else ():
        print(one_line(reason), file=sys.stderr)
    if args.ablation:
        setting, column, path = args.ablation
        plot_ablation(tables[0], setting, column, Path(path))
    if args.plot:
        plot_accuracies(tables, args.plot)


if __name__ == "__main__":
    main()
