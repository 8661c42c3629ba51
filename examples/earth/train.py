"""Trains the runs of docs/results/earth.md.

    python examples/earth/train.py output/earth
    python examples/earth/train.py output/earth_rates --rates 0.0005 0.001 0.002 --continents africa --seeds 10

The first command holds out each continent in turn, with five seeds. Finished runs are skipped, so that the same command
goes on, and several processes may share the work by `--rows`. The second tries learning rates, and the validation
blocks of the continents that are trained on choose one for each row.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import timm_moe_dg
from timm_moe_dg.data import get_benchmark

CONTINENTS = ("africa", "asia", "europe", "north_america", "oceania", "south_america")
SIZE = {"patch_size": 8, "depth": 4, "embed_dim": 96}
BATCH = 40  # images in a step, from all continents together
ROUTED: dict[str, object] = {"moe_layers": (2, 3)}
# Random weights find no domains with the default metadata_drop, see docs/results/geo_digits.md
PLACES: dict[str, object] = {"metadata_drop": 0.0}
# Row -> model, its options beside SIZE, learning rate
ROWS: dict[str, tuple[str, dict[str, object], float]] = {
    "erm": ("deit_tiny_patch16_224", {}, 5e-4),
    "erm_le": ("erm_le_tiny_patch16", PLACES, 1e-3),
    "d3g": ("d3g_tiny_patch16", {}, 5e-4),
    "gmoe": ("gmoe_tiny_patch16", ROUTED, 5e-4),
    "moge": ("moge_tiny", {**ROUTED, **PLACES}, 1e-3),
    "moge_geoclip": ("moge_tiny", {**ROUTED, **PLACES, "metadata_encoder": "geoclip"}, 2e-3),
    "moge_se": ("moge_tiny", {**ROUTED, **PLACES}, 5e-4),
    "gmoe_frozen": ("gmoe_tiny_patch16", ROUTED, 5e-4),
    "moge_frozen": ("moge_tiny", {**ROUTED, **PLACES}, 1e-3),
    "per_continent": ("deit_tiny_patch16_224", {}, 2e-3),
}
STEPS = {"moge_se": 101}  # a classifier alone


def train(folder: Path, row: str, continent: str, seed: int, rate: float) -> None:
    """Trains one run, unless it is finished. Row "per_continent" trains on the continent, and others hold it out."""
    name = f"{row}-{continent}-{seed}"
    if (folder / name / "done").exists():
        return
    model, kwargs, _ = ROWS[row]
    alone = row == "per_continent"
    options: dict[str, Any] = {"test_domains": [name for name in CONTINENTS if (name == continent) != alone]}
    options["batch_size"] = BATCH if alone else BATCH // (len(CONTINENTS) - 1)
    if row.startswith("moge"):
        options["coverage_radius"] = "auto"
    if row.endswith("frozen"):
        options["freeze"] = "routers"
    if row == "moge_se":
        start = folder / f"moge-{continent}-{seed}" / "best" / "model.safetensors"
        options |= {"initial_checkpoint": start, "freeze": "backbone", "expert_mode": "shared", "coverage_radius": None}
    timm_moe_dg.finetune(
        dataset="blue_marble",
        model=model,
        model_kwargs={**SIZE, **kwargs},
        steps=STEPS.get(row, 301),
        eval_freq=100,
        lr=rate,
        trial_seed=seed,
        workers=0,
        cpu_threads=1,
        output=folder,
        experiment=name,
        resume=folder / name if (folder / name / "args.yaml").exists() else None,
        **options,
    )


def main(words: Sequence[str] | None = None) -> None:
    """Trains all runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--continents", nargs="+", choices=CONTINENTS, default=CONTINENTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates to try")
    options = parser.parse_args(words)
    get_benchmark("blue_marble").read(None)  # names what is missing before the first run
    for seed, continent, row in product(options.seeds, options.continents, options.rows):
        if options.rates is None:
            train(options.output, row, continent, seed, ROWS[row][2])
        for rate in options.rates or ():
            train(options.output / f"rate_{rate:g}", row, continent, seed, rate)


if __name__ == "__main__":
    main()
