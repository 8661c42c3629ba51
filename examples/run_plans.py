"""Trains the runs of plans of `timm-moe-dg sweep` one after the other, in this process.

    python examples/run_plans.py RECIPE PLAN [PLAN ...]

Each run takes less time than the start of a process for it, and the images are read once. `timm-moe-dg sweep --recipe
RECIPE -c PLAN` trains the same runs. Finished runs are skipped. Braces in `initial_checkpoint` are filled in here with
options of the run, such as {trial_seed}.
"""

import sys
import time
from functools import cache
from pathlib import Path

import timm_moe_dg
from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.data import domains
from timm_moe_dg.protocols.planner import plan_runs


def main(recipe: str, *configs: str) -> None:
    """Runs the plans, and prints a line for each run."""
    domains.read_pixels = cache(domains.read_pixels)  # at most 200 MB
    for config in configs:
        values = checked(fields_of(SweepOptions), read_yaml(config, "config"), "sweep")
        plan = SweepOptions(recipe=recipe, **values)
        runs = plan_runs(read_sweep(plan, {}))
        for number, run in enumerate(runs, 1):
            options = dict(run.options)
            if start := options.get("initial_checkpoint"):
                options["initial_checkpoint"] = start.format(**options)
            if Path(plan.output, run.name, "done").exists():
                continue
            before = time.process_time()
            timm_moe_dg.finetune(**options, output=plan.output, experiment=run.name, resume="auto")
            print(f"[{number}/{len(runs)}] {run.name} {time.process_time() - before:.1f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
