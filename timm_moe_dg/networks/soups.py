"""Averages of the weights of several networks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers.experts import StackedLinear
from ..layers.moe_mlp import RoutedMlp
from ..layers.router import Router

Weights = Mapping[str, Tensor]  # a network's state_dict


def mean_weights(members: Sequence[Weights], shares: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Returns the mean of weights, with `shares` that sum to 1, or in equal parts.

    Whole-number buffers are those of the last member. Thresholds of routers that took no step do not count beside
    others. Other names or shapes than the first member's are an `ArgumentError`.
    """
    for before, after in pairwise(members):
        differing = [name for name in before.keys() | after.keys() if _shape(before, name) != _shape(after, name)]
        if differing:
            name = min(differing)
            shapes = f"{_shape(before, name)} in one network and {_shape(after, name)} in another"
            raise ArgumentError.of("weights", name, f"{shapes}; average equal networks")
    largest = {name: 1.0 if name.endswith("expert_thresholds") else torch.inf for name in members[0]}
    return {name: _mean([member[name] for member in members], shares, largest[name]) for name in members[0]}


def _shape(weights: Weights, name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None


def _mean(values: Sequence[Tensor], shares: Sequence[float] | None, largest: float) -> Tensor:
    """The mean of the values up to `largest`; a larger one where there is no other."""
    if not values[-1].is_floating_point():
        return values[-1]
    # In float64 the mean of equal float32 weights is exact
    wide = torch.stack([value.double() for value in values])
    counted = wide.new_tensor(shares or [1.0] * len(values)).view(-1, *[1] * values[-1].ndim) * ~(wide > largest)
    total = counted.sum(0)
    mean = (wide.where(counted > 0, 0.0) * counted).sum(0) / total
    return mean.where(total > 0, wide.amax(0)).to(values[-1].dtype)


def restricted_selection(scores: Sequence[float], correct: Callable[[Sequence[int]], int]) -> list[int]:
    """Selects the members of an average (DiWA, Rame et al., NeurIPS 2022, arXiv:2205.09739, algorithm 1).

    As in the released code, candidates are ranked by the mean of their validation accuracies over domains. An average
    is accepted if no fewer images of all domains' validation splits together are classified correctly.

    Args:
        scores: Mean validation accuracy of each candidate.
        correct: Returns the number of validation images that the average of some candidates classifies correctly.

    Returns:
        The candidates in order, without those that would lower the number.
    """
    selected: list[int] = []
    best = -1
    # Rounded, because means of equal accuracies may differ in the last bits
    for candidate in sorted(range(len(scores)), key=lambda candidate: -round(scores[candidate], 12)):
        count = correct([*selected, candidate])
        if count >= best:
            selected, best = [*selected, candidate], count
    return selected


def _expert_rows(module: nn.Module) -> Iterable[str]:
    """Names of a module's own weights that have a row for each expert."""
    if isinstance(module, Router) and not module.expert_rows:
        remedy = "does not name the weights of an expert (`expert_rows`); leave out --match-experts"
        raise ArgumentError.of("router", type(module).__name__, remedy)
    if isinstance(module, StackedLinear):
        return module.state_dict()
    return module.expert_rows if isinstance(module, Router) else ()


def match_experts(network: nn.Module, reference: Weights, weights: Weights) -> dict[str, Tensor]:
    """Orders experts like those of `reference`, which changes no output.

    Layer by layer, the order minimizes the sum of squared differences of all experts' weights and of their rows in the
    router (scipy's `linear_sum_assignment`). `network` shows which weights belong to experts.
    """
    matched = dict(weights)
    for layer, module in network.named_modules():
        if not isinstance(module, RoutedMlp):
            continue
        names = [f"{layer}.{name}.{row}" for name, part in module.named_modules() for row in _expert_rows(part)]
        rows = [[table[name].double().flatten(1) for name in names] for table in (reference, weights)]
        first, second = (torch.cat(parts, dim=1) for parts in rows)
        order = linear_sum_assignment(torch.cdist(first, second).square().numpy())[1]
        # A bias of an expert moves with it, and says nothing about likeness
        names += [f"{layer}.router.{state}" for state in Router.expert_state if f"{layer}.router.{state}" in weights]
        matched |= {name: weights[name][order] for name in names}
    return matched
