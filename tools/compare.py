r"""Compares rows on one data set, and says which one to take.

    timm-moe-dg compare --dataset folder --data-dir DATA
    timm-moe-dg compare --dataset place_folder --data-dir DATA --dry-run
    timm-moe-dg compare --dataset blue_marble -- --steps 60

The rows are the most frequent class, places alone if images have coordinates,
a linear classifier on the frozen source (probe), the fine-tuned source
(dense), and the source with experts (gmoe, and with coordinates erm_le and
moge). Each domain is held out in turn. Words after -- are options of finetune
for every trained row; the probe keeps its own. The same command again goes on
where it ended.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from timm_moe_dg.cli.arguments import add_options
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.comparisons.compare import CompareOptions, compare
from timm_moe_dg.comparisons.sweep import run_command
from timm_moe_dg.protocols.options import Arguments
from timm_moe_dg.results.answer import render_answer

# What --help shows; --help-all shows every option
MAIN = ["config", "dataset", "data_dir", "source", "initial_checkpoint", "from_scratch", "rows", "train", "rates"]
MAIN += ["trial_seeds", "domains", "format", "plot", "output", "jobs", "gpus", "dry_run"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("compare.py", __doc__, "[options] [-- options of finetune]", main=MAIN, config=True)
    add_options(parser, "comparison", CompareOptions)
    return parser


def answered(options: CompareOptions, given: Arguments, imports: Sequence[str]) -> str:
    """Returns the answer as text, empty if runs are left."""
    # Programs and pages take the answer alone
    answers = options.format != "text" and not (options.status or options.dry_run)
    with redirect_stdout(sys.stderr) if answers else nullcontext():
        answer = compare(options, given, imports)
    return render_answer(answer, options.format).rstrip() if answer else ""


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    if text := run_command(build_parser(), CompareOptions, argv, answered):
        print(text)


if __name__ == "__main__":
    main()
