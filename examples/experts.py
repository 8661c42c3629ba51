"""Measures how far the experts of finished runs differ, and what that is worth.

    python examples/experts.py output/fashion_shift/folder-top_2_ERM-test*

Prints for each run the distance between two experts' weights over the length of their mean, averaged over pairs and
matrices, and the distance from the mean to the start, if the run was upcycled. Percentages are accuracies on the
held-out domain: as trained, and with every expert replaced by the mean of all (equal). Two lines follow: means, and the
p value of a sign-flip test of the difference.
"""

import sys
from collections.abc import Sequence
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from timm_moe_dg.analysis.run_view import RunView, open_run
from timm_moe_dg.data.splits import group_part
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.results.comparison import sign_flip_p

COLUMNS = {"between experts": 3, "from the start": 3, "accuracy": 1, "equal": 1}  # with their numbers of digits


def relative(first: Tensor, second: Tensor, of: Tensor) -> float:
    """Distance of two matrices over the length of a third."""
    return ((first - second).norm() / of.norm()).item()


def accuracy(view: RunView) -> float:
    """Returns the accuracy of a run's network on its held-out domain, percent.

    Of photographs that domains share, those count that no domain was trained or validated on.
    """
    (position,) = view.args["test_domains"]
    domain = view.domains[position]
    indices = list(range(len(domain)))
    if view.args["split_by_photograph"]:
        indices = [index for index, path in enumerate(domain.paths) if group_part(Path(path).stem) == "test"]
    batches = view.batches((domain.pixels(index), None) for index in indices)
    predicted = torch.cat([view.model(*batch).argmax(1) for batch in batches])
    return 100 * (predicted == torch.as_tensor(domain.targets)[indices]).double().mean().item()


@torch.no_grad()
def equalize(model: nn.Module) -> None:
    """Replaces each expert by the mean of all experts of its layer."""
    for experts in model.modules():
        if isinstance(experts, StackedExperts):
            for parameter in experts.parameters():
                parameter.copy_(parameter.mean(0).expand_as(parameter).clone())


@torch.no_grad()
def measure(folder: Path) -> list[float]:
    """Returns the numbers of a run, in the order of `COLUMNS`."""
    view = open_run(folder)
    model: nn.Module = view.model
    start = load_file(view.args["initial_checkpoint"]) if view.args["initial_checkpoint"] else None
    between, moved = [], []
    for name, experts in model.named_modules():
        if isinstance(experts, StackedExperts):
            for layer in ("fc1", "fc2"):
                stack = experts.get_parameter(f"{layer}.weight")
                mean = stack.mean(0)
                between += [relative(first, second, mean) for first, second in combinations(stack, 2)]
                dense = f"{name.removesuffix('.experts')}.{layer}.weight"
                moved.append(relative(mean, start[dense], mean) if start else nan)
    trained = accuracy(view)
    equalize(model)
    return [fmean(between), fmean(moved), trained, accuracy(view)]


def main(folders: Sequence[str]) -> None:
    """Prints a line for each run, the means, and the p value."""
    rows = [measure(Path(folder)) for folder in folders]
    print("  ".join(COLUMNS))
    for row in [*rows, [fmean(column) for column in zip(*rows, strict=True)]]:
        cells = zip(COLUMNS.items(), row, strict=True)
        print("  ".join(f"{value:{len(name)}.{digits}f}" for (name, digits), value in cells))
    print(f"p: {sign_flip_p([equal - trained for *_, trained, equal in rows]):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
