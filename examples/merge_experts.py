"""Compares mixtures with the plain networks that their experts merge into, and with dense networks.

    python examples/merge_experts.py output/merged "output/earth/gmoe-*" "output/earth/erm-*"

The first folder gets the merged networks. The patterns name finished runs of mixtures and of dense networks, with the
same held-out domains and seeds in the same order. Prints the accuracy on held-out domains in percent, as mean and
standard error over seeds, milliseconds for an image on one thread, and the size of the weights. P values are those of
sign-flip tests over pairs of runs.
"""

import sys
from glob import glob
from pathlib import Path
from time import process_time

import pandas as pd
import timm
import torch
from timm.data import resolve_model_data_config

import timm_moe_dg
from timm_moe_dg.__main__ import main as command
from timm_moe_dg.results.comparison import sign_flip_p

BATCH, REPEATS = 64, 20


def merged(run: Path, folder: Path, alpha: int) -> Path:
    """Merges the experts of a run, unless this was done before, and returns the folder."""
    target = folder / f"alpha_{alpha}" / run.name
    words = ["--method", "experts", "--alpha", str(alpha), "--workers", "0", "--output", str(target)]
    command(["average", str(run), *words])
    return target


def accuracies(runs: list[Path]) -> pd.Series:
    """Returns the accuracies of the networks in best/ by held-out domains and seed, percent."""
    evaluations = pd.concat([timm_moe_dg.read_runs(run) for run in runs])
    return 100 * evaluations[evaluations.selected].set_index(["test_domains", "trial_seed"]).test_acc


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


def main(folder: str, mixtures: str, dense: str) -> None:
    """Merges all mixtures and prints the rows."""
    torch.set_num_threads(1)
    runs, plain = (sorted(map(Path, glob(pattern))) for pattern in (mixtures, dense))
    if not runs or not plain or not accuracies(runs).index.equals(accuracies(plain).index):
        sys.exit(f"{mixtures} and {dense} name no runs with the same held-out domains and seeds")
    mixture = accuracies(runs)
    mean, by_use = ([merged(run, Path(folder), alpha) for run in runs] for alpha in (0, 1))
    for name, group in {"mixture": runs, "merged, mean": mean, "merged, by use": by_use, "dense": plain}.items():
        scores = accuracies(group)
        by_seed = scores.groupby("trial_seed").mean()
        line = f"{name}: {by_seed.mean():.1f} ± {by_seed.sem():.1f}, {cost(group[0])}"
        if name != "mixture":
            differences = scores - mixture
            p = sign_flip_p(differences.tolist())
            line += f", {differences.mean():+.1f} to the mixture (p = {p:.3f})"
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
