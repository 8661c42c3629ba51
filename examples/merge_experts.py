"""Compares mixtures with the plain networks that their experts merge into, and with dense networks.

    python examples/merge_experts.py output/merged "output/earth/gmoe-*" "output/earth/erm-*"

The first folder gets the merged networks. The patterns name finished runs of mixtures and of dense networks, with the
same held-out domains and seeds in the same order. Prints the accuracy on held-out domains in percent, as mean and
standard error over seeds, milliseconds for an image on one thread, and the size of the weights. P values are those of
sign-flip tests over pairs of runs.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from glob import glob
from math import nan
from pathlib import Path
from statistics import fmean, stdev
from time import process_time

import timm
import torch
from timm.data import resolve_model_data_config

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.__main__ import main as command
from timm_moe_dg.protocols.records import Record, read_records
from timm_moe_dg.protocols.selection import headlines, training_domain_validation
from timm_moe_dg.results.comparison import sign_flip_p

NAMES = ("mixture", "merged, mean", "merged, by use", "dense")
BATCH, REPEATS = 64, 20


def merged(run: Path, folder: Path, alpha: int) -> Path:
    """Merges the experts of a run, unless this was done before, and returns the folder."""
    target = folder / f"alpha_{alpha}" / run.name
    words = ["--method", "experts", "--alpha", str(alpha), "--workers", "0", "--output", str(target)]
    command(["average", str(run), *words])
    return target


def selected(run: Path) -> Record:
    """Returns the evaluation of the network in best/."""
    return training_domain_validation(read_records(run / "results.jsonl"))


@torch.inference_mode()
def cost(run: Path) -> str:
    """Returns milliseconds of a processor for an image, the least of several batches, and the megabytes of weights."""
    network = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).eval()
    images = torch.randn(BATCH, *resolve_model_data_config(network)["input_size"])
    times = []
    for _ in range(REPEATS):
        start = process_time()
        network(images)
        times.append(process_time() - start)
    size = (run / "best" / "model.safetensors").stat().st_size
    return f"{1000 * min(times) / BATCH:.2f} ms, {size / 1e6:.1f} MB"


def row(runs: Sequence[Path], others: Sequence[float]) -> list[float]:
    """Prints accuracy and cost of some runs, and the p value of their differences to others; returns the others."""
    records = [selected(run) for run in runs]
    accuracies = [100 * headlines(record)[0].value for record in records]
    by_seed = defaultdict(list)
    for record, accuracy in zip(records, accuracies, strict=True):
        by_seed[record.args["trial_seed"]].append(accuracy)
    means = [fmean(values) for values in by_seed.values()]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else nan
    line = f"{fmean(means):.1f} ± {error:.1f}, {cost(runs[0])}"
    if others:
        differences = [first - second for first, second in zip(accuracies, others, strict=True)]
        line += f", {fmean(differences):+.1f} to the mixture (p = {sign_flip_p(differences):.3f})"
    print(line)
    return list(others) or accuracies


def main(folder: str, mixtures: str, dense: str) -> None:
    """Merges all mixtures and prints the rows."""
    torch.set_num_threads(1)
    runs, plain = (sorted(map(Path, glob(pattern))) for pattern in (mixtures, dense))
    facts = [
        [(selected(run).test_domains, selected(run).args["trial_seed"]) for run in group] for group in (runs, plain)
    ]
    if not runs or facts[0] != facts[1]:
        sys.exit(f"{mixtures} and {dense} name no runs with the same held-out domains and seeds")
    groups = [runs, *([merged(run, Path(folder), alpha) for run in runs] for alpha in (0, 1)), plain]
    mixture: list[float] = []
    for name, group in zip(NAMES, groups, strict=True):
        print(name, end=": ")
        mixture = row(group, mixture)


if __name__ == "__main__":
    main(*sys.argv[1:])
