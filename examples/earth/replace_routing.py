"""Measures whether the experts of finished runs do anything.

    export PYTHONPATH=examples
    python examples/earth/replace_routing.py output/earth/gmoe-a* output/earth/moge-a* --output routing.csv

Each network is scored on its test images as trained, and with one thing replaced: every expert by the mean of all
(`equal`), the routing of each token or image by that of another one (`permuted`), and all routing by one expert
(`forced`, the expert that is best on the images of that column). The images are shuffled, so that the other image is
mostly of another domain. The table has a row for each run and mode: accuracies in percent on test images of
domains that were trained on (`id`), if the data reserve some, and on the held-out domain (`unseen`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from experts import equalize, forced, permuted, rerouted

from timm_moe_dg.analysis.run_view import RunView, open_run
from timm_moe_dg.data import Domain
from timm_moe_dg.data.splits import make_splits
from timm_moe_dg.layers import Router


def test_images(view: RunView) -> tuple[list[tuple[Domain, int]], np.ndarray]:
    """Returns domain and position of the test images in a random order, and whether each is of an unseen domain."""
    domains, args = view.domains, view.args
    training = [index for index in range(len(domains)) if index not in args["test_domains"]]
    splits = make_splits(domains, training, args)
    images = [(domains[d], int(i)) for d in args["test_domains"] for i in splits[d].inside]
    order = np.random.default_rng(0).permutation(len(images))
    images = [images[index] for index in order]
    return images, np.array([domain.role != "id" for domain, _ in images])


@torch.inference_mode()
def correct(view: RunView, images: Sequence[tuple[Domain, int]]) -> np.ndarray:
    """Marks the images that the network classifies correctly, bool (N,)."""
    torch.manual_seed(0)
    pairs = ((domain.pixels(index), view.metadata(domain, index)) for domain, index in images)
    predicted = torch.cat([view.model(*batch).argmax(1) for batch in view.batches(pairs)])
    return predicted.numpy() == np.array([domain.targets[index] for domain, index in images])


def measure(folder: Path) -> list[dict[str, object]]:
    """Returns a row for each mode of a run."""
    view = open_run(folder, batch_size=256)
    images, unseen = test_images(view)
    experts = next(module for module in view.model.modules() if isinstance(module, Router)).num_experts
    marks = {"as trained": correct(view, images)}
    with rerouted(view.model, permuted):
        marks["permuted"] = correct(view, images)
    each = []
    for expert in range(experts):
        with rerouted(view.model, forced(expert)):
            each.append(correct(view, images))
    equalize(view.model)
    marks["equal"] = correct(view, images)
    rows = {mode: {"id": mark[~unseen], "unseen": mark[unseen]} for mode, mark in marks.items()}
    shares = [
        {
            "run": folder.name,
            "mode": mode,
            **{name: 100 * part.mean() if len(part) else np.nan for name, part in row.items()},
        }
        for mode, row in rows.items()
    ]
    parts = {"id": ~unseen, "unseen": unseen}
    best = {
        name: max(100 * mark[part].mean() if part.any() else np.nan for mark in each) for name, part in parts.items()
    }
    return [*shares, {"run": folder.name, "mode": "forced", **best}]


def main(words: Sequence[str] | None = None) -> None:
    """Writes the table, and prints means over runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    options = parser.parse_args(words)
    table = pd.DataFrame([row for folder in options.runs for row in measure(folder)])
    table.to_csv(options.output, index=False)
    print(table.groupby("mode", sort=False)[["id", "unseen"]].mean().round(1).to_string())


if __name__ == "__main__":
    main()
