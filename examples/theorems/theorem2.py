"""Trains one mixture layer on a function with branches, for several numbers of experts.

    python examples/theorems/theorem2.py --output output/theorem2
    python examples/theorems/theorem2.py --quick --output output/quick

GMoE's Theorem 2 suggests this experiment; the paper does not have it. One coordinate of the input falls into one of M
intervals (Algorithm 1 of the paper). The interval selects which of M random two-layer functions of the other
coordinates is the target. The model is this package's `MoeMlp` with K = 1, N = 1 to 2M experts of equal width, the
cosine router and its auxiliary loss. The baseline is a dense network: one expert of the N experts' total width. The
output folder receives theorem2.json and theorem2.png: held-out error, and agreement of experts with branches.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fit import fit, predict
from plots import plot_against_experts
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor, nn

from timm_moe_dg.layers import MoeMlp
from timm_moe_dg.losses import auxiliary_loss

REST, CONDITION = 8, 2  # coordinates: inputs of the branches; the condition and a constant 1
FEATURES = REST + CONDITION
BRANCHES, WIDTH = 4, 16  # of the target, and of each expert
EPOCHS, HELD_OUT = 20, 4000  # passes over the samples; held-out samples
MIXTURE, DENSE = "N experts, K = 1", "dense, same total width"


class Samples(NamedTuple):
    """Inputs (S, FEATURES), targets (S, REST) of unit variance, and each sample's branch (S,)."""

    inputs: Tensor
    targets: Tensor
    branches: Tensor


class Branches:
    """M random functions z -> B tanh(A z) of the same size.

    Args:
        number: M.
        generator: Draws the matrices.
        hidden: Width of each function.
    """

    def __init__(self, number: int, generator: torch.Generator, hidden: int = 8) -> None:
        self.number = number
        self.first = 2 * torch.randn(number, hidden, REST, generator=generator) / REST**0.5
        self.second = torch.randn(number, REST, hidden, generator=generator) / hidden**0.5

    def apply(self, z: Tensor, branches: Tensor) -> Tensor:
        """(S, REST) inputs and (S,) branches -> (S, REST)."""
        hidden = torch.einsum("mhd,sd->smh", self.first, z).tanh()
        outputs = torch.einsum("moh,smh->smo", self.second, hidden)
        return outputs[torch.arange(len(z)), branches]

    def draw(self, samples: int, generator: torch.Generator) -> Samples:
        """Draws inputs: the condition uniform on -1 to 1, whose M equal intervals are the branches; the rest normal."""
        condition = 2 * torch.rand(samples, generator=generator) - 1
        branches = ((condition + 1) / 2 * self.number).long().clamp(max=self.number - 1)
        z = torch.randn(samples, REST, generator=generator)
        inputs = torch.cat([condition[:, None], torch.ones(samples, 1), z], 1)
        return Samples(inputs, self.apply(z, branches), branches)


def make_sets(branches: int, samples: int, seed: int) -> tuple[Samples, Samples]:
    """Draws the functions, training samples and held-out samples; training targets have unit variance."""
    generator = torch.Generator().manual_seed(seed)
    functions = Branches(branches, generator)
    train, held_out = functions.draw(samples, generator), functions.draw(HELD_OUT, generator)
    scale = train.targets.std()  # of the training set, also for the held-out samples
    return train._replace(targets=train.targets / scale), held_out._replace(targets=held_out.targets / scale)


def fit_squares(model: nn.Module, data: Samples, seed: int, lr: float) -> nn.Module:
    """Trains on the squared error plus the auxiliary loss."""

    def objective(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared_error(outputs, targets) + 0.01 * auxiliary_loss(model)

    order = torch.Generator().manual_seed(seed)
    for _ in fit(model, data.inputs, data.targets, objective, epochs=EPOCHS, generator=order, lr=lr):
        pass
    return model


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of the first REST outputs; 1 for a model whose outputs are zero."""
    return nn.functional.mse_loss(outputs[:, :REST], targets)


def train(num_experts: int, seed: int, samples: int, lr: float) -> dict[str, float]:
    """Trains the mixture and its dense counterpart; returns their held-out scores."""
    data, held_out = make_sets(BRANCHES, samples, seed)
    torch.manual_seed(seed)
    mixture = MoeMlp(FEATURES, WIDTH, num_experts=num_experts, top_k=1)
    fit_squares(mixture, data, seed, lr)
    mixture.record_routing = True  # layers record their routing in training only
    error = squared_error(predict(mixture, held_out.inputs), held_out.targets).item()
    assert mixture.routing is not None
    experts = mixture.routing.expert_indices[:, 0]
    dense = fit_squares(MoeMlp(FEATURES, num_experts * WIDTH, num_experts=1, top_k=1), data, seed, lr)
    row = {
        "num_experts": num_experts,
        "seed": seed,
        "error": error,
        "dense_error": squared_error(predict(dense, held_out.inputs), held_out.targets).item(),
        "nmi": float(normalized_mutual_info_score(experts, held_out.branches)),
        "experts_used": len(experts.unique()),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the results; files there are replaced")
    words = "a fifth of the samples, one seed, three values of N, and a higher rate: seconds"
    parser.add_argument("--quick", action="store_true", help=words)
    args = parser.parse_args(argv)
    samples, seeds, lr, numbers = 20_000, [0, 1, 2], 1e-3, list(range(1, 2 * BRANCHES + 1))
    if args.quick:
        # All epochs stay, since with fewer steps nothing is learned and the dense network leads
        samples, seeds, lr, numbers = 4_000, [0], 3e-3, [1, BRANCHES, 2 * BRANCHES]
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are small
    rows = []
    for seed, num_experts in product(seeds, numbers):
        rows.append(train(num_experts, seed, samples, lr))
        (args.output / "theorem2.json").write_text(json.dumps(rows, indent=1) + "\n")
    # (seeds, numbers of experts) of each quantity
    by_number = {name: np.array([row[name] for row in rows]).reshape(-1, len(numbers)) for name in rows[0]}
    errors = {MIXTURE: by_number["error"], DENSE: by_number["dense_error"]}
    panels = {"held-out error": errors, "NMI (expert, branch)": {MIXTURE: by_number["nmi"]}}
    plot_against_experts(panels, numbers, BRANCHES, args.output / "theorem2.png")


if __name__ == "__main__":
    main()
