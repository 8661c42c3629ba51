r"""Runs a protocol: every held-out domain with every model, method and seed.

    timm-moe-dg sweep --datasets rotated_digits --output output/digits \
        --models gmoe_tiny_patch16 deit_tiny_patch16_224 -- --steps 300
    timm-moe-dg sweep --datasets rotated_digits --rows rows.yaml
    timm-moe-dg sweep --recipe gmoe_small --datasets PACS --data-dir DATA
    timm-moe-dg sweep -c digits --dry-run

Words after -- are options of finetune for every run. The same command again
skips finished runs and resumes the others. Files for --rows hold rows to
compare, each with options of finetune. Files for --recipe hold options of
finetune, files for -c those of sweep. The last two take the name of a recipe
that comes with the package.
On Slurm, --launcher slurm submits the runs as one array:

    timm-moe-dg sweep ... --launcher slurm --slurm slurm_partition=gpu
"""

from collections.abc import Sequence

from timm_moe_dg.cli.arguments import add_options
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.comparisons.sweep import LaunchOptions, PlanOptions, SweepOptions, run_command, sweep

# What --help shows; --help-all shows every option
MAIN = ["config", "recipe", "datasets", "data_dir", "rows", "algorithms", "models", "protocols", "domains"]
MAIN += ["trial_seeds", "output", "launcher", "jobs", "dry_run", "status"]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("sweep.py", __doc__, "[options] [-- options of finetune]", main=MAIN, config=True)
    add_options(parser, "plan", PlanOptions)
    add_options(parser, "launch", LaunchOptions)
    return parser


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    run_command(build_parser(), SweepOptions, argv, sweep)


if __name__ == "__main__":
    main()
