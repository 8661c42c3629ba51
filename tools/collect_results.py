"""Prints tables of finished runs by selection rule.

    timm-moe-dg tables output/digits
    timm-moe-dg tables output/gmoe_small --papers
    timm-moe-dg tables output/digits --new-site
    timm-moe-dg tables output/digits --format markdown --plot accuracies.png

Numbers are percent, with mean and standard error over trial seeds. Unfinished
runs are left out, and missing runs are listed. Runs of DomainBed are read too.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from timm_moe_dg.analysis.plots import plot_accuracies
from timm_moe_dg.cli.text import one_line
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import run_folder
from timm_moe_dg.errors import ArgumentError, RecordError
from timm_moe_dg.metrics import METRICS
from timm_moe_dg.protocols.records import SplitName
from timm_moe_dg.results.answer import ZERO, answer, pairs_text, scores_of
from timm_moe_dg.results.comparison import FORMATS, data_frame, data_text, render
from timm_moe_dg.results.new_site import new_site, render_site, site_frame
from timm_moe_dg.results.papers import rows_without_figures
from timm_moe_dg.results.runs import FinishedRun, find_runs
from timm_moe_dg.results.tables import (
    OFFICIAL_RULES,
    OPTIONAL_COLUMNS,
    RULES,
    SINGLE_SOURCE,
    VALIDATION,
    Table,
    is_tabled,
    make_tables,
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
    format_ = "format of the tables (default: %(default)s)"
    add("--format", choices=[*FORMATS, *DATA_FORMATS], default="text", help=format_)
    whole = "report both splits of the test domain, as for your own data (default for benchmarks: the in-split, as in "
    whole += "DomainBed)"
    add("--whole-domain", action="store_true", help=whole)
    names = ", ".join(OPTIONAL_COLUMNS)
    further = f"additional columns, of {names}: mean score on the out-splits of training or held-out domains, and "
    further += "scores on the reported part of held-out domains"
    add("--columns", nargs="+", choices=OPTIONAL_COLUMNS, default=[], metavar="NAME", help=further)
    add("--groups", action="store_true", help="add a column for every group, for data with its own test domains")
    add("--papers", action="store_true", help="set the papers' figures beside the columns, for runs of their recipes")
    add("--plot", type=Path, metavar="PNG", help="draw the tables as bars with standard errors (needs matplotlib)")
    return parser


def note(lines: Iterable[str]) -> None:
    """Prints lines beside the tables."""
    for line in lines:
        print(one_line(line), file=sys.stderr)


def print_new_site(args: argparse.Namespace, parser: ToolParser, runs: Sequence[FinishedRun]) -> None:
    """Prints the accuracy to expect at a new site."""
    with_effect = ("folders", "format", "imports", "new_site", "whole_domain")
    for name, value in vars(args).items():
        if name not in with_effect and value != parser.get_default(name):
            raise ArgumentError.of(name, value, "has no effect beside --new-site; leave one of them out")
    site = new_site(runs, "whole" if args.whole_domain else None)
    data = args.format in DATA_FORMATS
    print(data_text(site_frame(site), args.format) if data else f"{render_site(site, args.format)}\n", end="")


def print_tables(args: argparse.Namespace, tables: Sequence[Table]) -> None:
    """Prints tables. Differences of rows with names follow those of training-domain validation."""
    if args.format in DATA_FORMATS:
        print(data_text(data_frame(tables, args.papers), args.format), end="")
        note(f"missing in {table.title}: {phrase}" for table in tables for phrase in table.missing)
    else:
        parts = []
        for table in tables:
            parts.append(render(table, args.format, args.papers))
            runs = [run for runs in table.runs.values() for run in runs]
            if table.rule == VALIDATION and any(run.args.get("row") for run in runs):
                scores = scores_of(runs, "whole" if args.whole_domain else None)
                if set(scores.row) != {ZERO}:
                    parts += pairs_text(answer(scores, {}, metric=METRICS[runs[0].metric]), args.format)
        print("\n\n".join(parts))


@tool
def main(argv: Sequence[str]) -> None:
    """Reads the runs and prints their tables."""
    parser = build_parser()
    args = parser.parse_args(argv)
    runs, unfinished = find_runs(args.folders)
    if not runs:
        reason = f"no finished runs, {len(unfinished)} unfinished; wait, or give other folders"
        raise RecordError(f"folders={args.folders}: {reason}")
    note([f"{len(runs)} finished runs"])
    note(f"holds out no domain, left out: {run.folder}" for run in runs if not run.test_domains)
    note(f"not finished, left out: {folder}" for folder in unfinished)
    if args.new_site:
        print_new_site(args, parser, runs)
        return
    further = [OPTIONAL_COLUMNS[name] for name in args.columns]
    split: SplitName | None = "whole" if args.whole_domain else None
    tables = make_tables(runs, args.rules or RULES, split, further, by_group=args.groups)
    without_table = [rule for rule in args.rules or () if rule not in {table.rule for table in tables}]
    reasons = [f"{rule}: no run has the held-out domains or scores that this rule needs" for rule in without_table]
    if not tables:
        raise RecordError("; ".join(reasons) or "rules: no rule has all of its runs; see sweep --status")
    if args.whole_domain:
        others = [table.title for table in tables if table.rule in (SINGLE_SOURCE, *OFFICIAL_RULES)]
        reasons += [f"--whole-domain has no effect on: {title}" for title in others]
    note(reasons)
    if not args.rules:
        left_out = [run for run in runs if run.test_domains and not is_tabled(run, tables)]
        note(f"holds out {len(run.test_domains)} domains, in no table: {run.folder}" for run in left_out)
    print_tables(args, tables)
    without = rows_without_figures(tables) if args.papers else ()
    note(f"papers: {row}: no recipe has its settings, so no figure stands beside it" for row in without)
    if args.plot:
        plot_accuracies(tables, args.plot)


if __name__ == "__main__":
    main()
