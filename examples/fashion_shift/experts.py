"""Measures how far the experts of finished runs differ, and what that is worth.

    python examples/fashion_shift/experts.py output/fashion_shift/folder-top_2-ERM-test*

Prints for each run, and for their mean: the distance between two experts' weights over the length of their mean,
averaged over pairs and matrices; the same for the distance from the mean to the start; the accuracy on the held-out
domain, in percent, and that with every expert replaced by the mean of all.
"""

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from timm_moe_dg.analysis.run_view import RunView, open_run
from timm_moe_dg.layers.experts import StackedExperts


def relative(first: Tensor, second: Tensor, of: Tensor) -> float:
    """Distance of two matrices over the length of a third."""
    return ((first - second).norm() / of.norm()).item()


@torch.no_grad()
def accuracy(view: RunView) -> float:
    """Accuracy of a run's network on its held-out domain, percent."""
    (position,) = view.args["test_domains"]
    domain = view.domains()[position]
    batches = view.batches((domain.image(index), None) for index in range(len(domain)))
    predicted = torch.cat([view.model(*batch).argmax(1) for batch in batches])
    return 100 * (predicted == torch.as_tensor(domain.targets)).double().mean().item()


@torch.no_grad()
def measure(folder: Path) -> list[float]:
    """Returns the four numbers of a run."""
    view = open_run(folder)
    model: nn.Module = view.model
    start = load_file(view.args["initial_checkpoint"])
    between, moved, score = [], [], accuracy(view)
    for name, experts in model.named_modules():
        if isinstance(experts, StackedExperts):
            for layer in ("fc1", "fc2"):
                stack = experts.get_parameter(f"{layer}.weight")
                mean = stack.mean(0)
                between += [relative(first, second, mean) for first, second in combinations(stack, 2)]
                moved.append(relative(mean, start[f"{name.removesuffix('.experts')}.{layer}.weight"], mean))
            for parameter in experts.parameters():
                parameter.copy_(parameter.mean(0).expand_as(parameter).clone())
    return [fmean(between), fmean(moved), score, accuracy(view)]


def main(folders: Sequence[str]) -> None:
    """Prints a line for each run, and the means."""
    rows = [measure(Path(folder)) for folder in folders]
    print("between experts  from the start  accuracy  with equal experts")
    for row in [*rows, [fmean(column) for column in zip(*rows, strict=True)]]:
        print("{:15.3f}  {:14.3f}  {:8.1f}  {:18.1f}".format(*row))


if __name__ == "__main__":
    main(sys.argv[1:])
