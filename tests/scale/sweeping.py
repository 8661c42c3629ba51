"""A sweep of thousands of planned runs, half of them finished: how long --dry-run and --status take, and memory.

    python -m tests.scale.sweeping
    python -m tests.scale.sweeping --trial-seeds 1

Four data sets of four domains, five models and 25 trial seeds are 2,000 runs; nothing is trained.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.protocols.options import DEFAULTS
from timm_moe_dg.protocols.planner import Choice, Sweep, plan_runs
from timm_moe_dg.protocols.run_identity import benchmark_defaults

from .processes import peak

TOOL = Path(__file__).parents[2] / "tools" / "sweep.py"
DATASETS = ("PACS", "VLCS", "OfficeHome", "TerraIncognita")
MODELS = ("deit_tiny_patch16_224", "gmoe_tiny_patch16", "moge_tiny", "resnet18", "resnet50")


def planned(trial_seeds: int) -> Sweep:
    """Sixteen held-out domains, five models, and so many seeds."""
    axes: Mapping[str, Any] = {
        "datasets": [Choice.of("dataset", name) for name in DATASETS],
        "models": [Choice.of("model", name) for name in MODELS],
        "algorithms": [Choice.of("algorithm", "ERM")],
    }
    return Sweep(**axes, protocols=["leave_one_domain_out"], trial_seeds=range(trial_seeds), options={"steps": 100})


def command(output: Path, trial_seeds: int, *words: str) -> list[str]:
    """The command line of the same sweep."""
    seeds = map(str, range(trial_seeds))
    axes = ["--datasets", *DATASETS, "--models", *MODELS, "--trial-seeds", *seeds, "--options", "steps=100"]
    return [sys.executable, str(TOOL), *axes, "--output", str(output), *words]


def write_finished(output: Path, trial_seeds: int) -> int:
    """Writes args.yaml (no digests of data) and done of every second run; returns how many runs are planned."""
    runs = plan_runs(planned(trial_seeds))
    for run in runs[::2]:
        folder = output / run.name
        folder.mkdir(parents=True)
        given = {**DEFAULTS, "experiment": run.name, **run.options}
        filled = benchmark_defaults(given, get_benchmark(run.options["dataset"]))
        args = {**given, **{name: value for name, value in filled.items() if given[name] is None}}
        (folder / "args.yaml").write_text(yaml.dump(args, Dumper=yaml.CSafeDumper))
        (folder / "done").write_text("done")
    return len(runs)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.sweeping", description=__doc__)
    parser.add_argument("--trial-seeds", type=int, default=25)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        count = write_finished(Path(folder), args.trial_seeds)
        for word in ("--help", "--dry-run", "--status"):
            report = peak(command(Path(folder), args.trial_seeds, word))
            sys.stdout.write(f"{word} of {count} runs: {report}\n")


if __name__ == "__main__":
    main()
