"""Measures how far the experts of finished runs differ, and what that and the routing are worth.

    python examples/experts.py output/fashion_shift/folder-top_2_ERM-test*

Prints for each run the distance between two experts' weights over the length of their mean, averaged over pairs and
matrices, and the distance from the mean to the start, if the run was upcycled. Percentages are accuracies on the
held-out domain: as trained, with every expert replaced by the mean of all (equal), with each token routed as another
one (permuted), with one expert for all tokens (one, the mean over experts), and with routers initialized again
(random). Two lines follow: means, and p values of a sign-flip test of each accuracy against that as trained.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from timm_moe_dg.analysis.run_view import RunView, open_run, redraw_routers
from timm_moe_dg.data.splits import group_part
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.layers.reports import RouterOutput
from timm_moe_dg.layers.router import Router
from timm_moe_dg.results.comparison import sign_flip_p

COLUMNS = ("between experts", "from the start", "accuracy", "equal", "permuted", "one", "random")
Score = Callable[[], float]


def relative(first: Tensor, second: Tensor, of: Tensor) -> float:
    """Distance of two matrices over the length of a third."""
    return ((first - second).norm() / of.norm()).item()


def scorer(view: RunView) -> Score:
    """Returns a function for the accuracy of a run's network on its held-out domain, percent.

    Of photographs that domains share, those count that no domain was trained or validated on.
    """
    (position,) = view.args["test_domains"]
    domain = view.domains[position]
    indices = list(range(len(domain)))
    if view.args["split_by_photograph"]:
        indices = [index for index, path in enumerate(domain.paths) if group_part(Path(path).stem) == "test"]
    batches = list(view.batches((domain.pixels(index), None) for index in indices))
    targets = torch.as_tensor(domain.targets)[indices]

    def accuracy() -> float:
        predicted = torch.cat([view.model(*batch).argmax(1) for batch in batches])
        return 100 * (predicted == targets).double().mean().item()

    return accuracy


@contextmanager
def rerouted(model: nn.Module, change: Callable[[RouterOutput], RouterOutput]) -> Iterator[None]:
    """Changes what the routers of a model return."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda *parts: change(parts[-1])) for router in routers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def permuted(routing: RouterOutput) -> RouterOutput:
    """Gives each token the experts and weights of another one."""
    order = torch.randperm(len(routing.logits))
    indices, weights = routing.expert_indices[order], routing.combine_weights[order]
    return routing._replace(expert_indices=indices, combine_weights=weights)


def forced(expert: int) -> Callable[[RouterOutput], RouterOutput]:
    """Returns a change that sends all tokens to one expert."""
    return lambda routing: routing._replace(expert_indices=torch.full_like(routing.expert_indices, expert))


@torch.no_grad()
def equalize(model: nn.Module) -> None:
    """Replaces each expert by the mean of all experts of its layer."""
    for experts in model.modules():
        if isinstance(experts, StackedExperts):
            for parameter in experts.parameters():
                parameter.copy_(parameter.mean(0).expand_as(parameter).clone())


def one_expert(score: Score, model: nn.Module) -> float:
    """Mean accuracy, over experts, if all tokens go to one."""
    (count,) = {module.num_experts for module in model.modules() if isinstance(module, Router)}
    scores = []
    for expert in range(count):
        with rerouted(model, forced(expert)):
            scores.append(score())
    return fmean(scores)


@torch.no_grad()
def measure(folder: Path) -> list[float]:
    """Returns the numbers of a run, in the order of `COLUMNS`."""
    view = open_run(folder)
    model: nn.Module = view.model
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    start = load_file(view.args["initial_checkpoint"]) if view.args["initial_checkpoint"] else None
    score = scorer(view)
    accuracy, one = score(), one_expert(score, model)
    torch.manual_seed(0)
    with rerouted(model, permuted):
        shuffled = score()
    redraw_routers(model)
    random = score()
    model.load_state_dict(trained)
    between, moved = [], []
    for name, experts in model.named_modules():
        if isinstance(experts, StackedExperts):
            for layer in ("fc1", "fc2"):
                stack = experts.get_parameter(f"{layer}.weight")
                mean = stack.mean(0)
                between += [relative(first, second, mean) for first, second in combinations(stack, 2)]
                dense = f"{name.removesuffix('.experts')}.{layer}.weight"
                moved.append(relative(mean, start[dense], mean) if start else nan)
    equalize(model)
    return [fmean(between), fmean(moved), accuracy, score(), shuffled, one, random]


def main(folders: Sequence[str]) -> None:
    """Prints a line for each run, the means, and the p values."""
    rows = [measure(Path(folder)) for folder in folders]
    columns = list(zip(*rows, strict=True))
    print("  ".join(COLUMNS))
    digits = [3 if name in COLUMNS[:2] else 1 for name in COLUMNS]
    for row in [*rows, [fmean(column) for column in columns]]:
        cells = zip(COLUMNS, digits, row, strict=True)
        print("  ".join(f"{value:{len(name)}.{places}f}" for name, places, value in cells))
    differences = [[a - b for a, b in zip(column, columns[2], strict=True)] for column in columns[3:]]
    print("p:", "  ".join(f"{sign_flip_p(values):.3f}" for values in differences))


if __name__ == "__main__":
    main(sys.argv[1:])
