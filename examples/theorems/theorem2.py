"""Trains one mixture layer on a function with branches, for several numbers of experts.

    python examples/theorems/theorem2.py --output output/theorem2
    python examples/theorems/theorem2.py --branches 6 --quick --output output/theorem2_six

GMoE's Theorem 2 suggests this experiment; the paper does not have it. One coordinate of the input falls into one of M
intervals (Algorithm 1 of the paper). The interval selects which of M random two-layer functions of the other
coordinates is the target. The model is this package's `MoeMlp` with K = 1, N = 1 to 2M experts of equal width, the
cosine router and its auxiliary loss. The baseline is a dense network: one expert of the N experts' total width. The
output folder receives theorem2.json and theorem2.png: held-out error, and agreement of experts with branches.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fit import fit, predict
from plots import plot_against_experts
from sklearn.metrics import normalized_mutual_info_score
from torch import Tensor, nn

from timm_moe_dg.cli.values import non_negative, positive_int
from timm_moe_dg.layers import MoeMlp
from timm_moe_dg.losses import auxiliary_loss

REST, CONDITION = 8, 2  # coordinates: inputs of the branches; the condition and a constant 1
FEATURES = REST + CONDITION
HELD_OUT = 4000
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


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="theorem2.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="folder of the results; files there are replaced")
    add("--branches", type=positive_int, default=4, metavar="M", help="branches of the target (default: %(default)s)")
    add("--width", type=positive_int, default=16, metavar="H", help="width of each expert (default: %(default)s)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED", help="repetitions (default: %(default)s)")
    add("--epochs", type=positive_int, default=20, metavar="N", help="passes over the samples (default: %(default)s)")
    add("--samples", type=positive_int, default=20_000, metavar="N", help="training samples (default: %(default)s)")
    coefficient = "weight of the auxiliary loss (default: %(default)s)"
    add("--aux-coef", type=non_negative, default=0.01, metavar="C", help=coefficient)
    add(
        "--quick",
        action="store_true",
        help="a fifth of the samples, one seed, three values of N, and a higher rate: seconds",
    )
    return parser


def make_sets(branches: int, samples: int, seed: int) -> tuple[Samples, Samples]:
    """Draws the functions, training samples and held-out samples; training targets have unit variance."""
    generator = torch.Generator().manual_seed(seed)
    functions = Branches(branches, generator)
    train, held_out = functions.draw(samples, generator), functions.draw(HELD_OUT, generator)
    scale = train.targets.std()  # of the training set, also for the held-out samples
    return train._replace(targets=train.targets / scale), held_out._replace(targets=held_out.targets / scale)


def fit_squares(model: nn.Module, data: Samples, seed: int, args: argparse.Namespace) -> nn.Module:
    """Trains on the squared error plus the auxiliary loss."""

    def objective(outputs: Tensor, targets: Tensor) -> Tensor:
        return squared_error(outputs, targets) + args.aux_coef * auxiliary_loss(model)

    order = torch.Generator().manual_seed(seed)
    for _ in fit(model, data.inputs, data.targets, objective, epochs=args.epochs, generator=order, lr=args.lr):
        pass
    return model


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of the first REST outputs; 1 for a model whose outputs are zero."""
    return nn.functional.mse_loss(outputs[:, :REST], targets)


def train(num_experts: int, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Trains the mixture and its dense counterpart; returns their held-out scores."""
    start = time.perf_counter()
    data, held_out = make_sets(args.branches, args.samples, seed)
    torch.manual_seed(seed)
    mixture = MoeMlp(FEATURES, args.width, num_experts=num_experts, top_k=1)
    fit_squares(mixture, data, seed, args)
    mixture.record_routing = True  # layers record their routing in training only
    error = squared_error(predict(mixture, held_out.inputs), held_out.targets).item()
    assert mixture.routing is not None
    experts = mixture.routing.expert_indices[:, 0]
    dense = fit_squares(MoeMlp(FEATURES, num_experts * args.width, num_experts=1, top_k=1), data, seed, args)
    row = {
        "num_experts": num_experts,
        "seed": seed,
        "error": error,
        "dense_error": squared_error(predict(dense, held_out.inputs), held_out.targets).item(),
        "nmi": float(normalized_mutual_info_score(experts, held_out.branches)),
        "experts_used": len(experts.unique()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(", ".join(f"{name} {value:.3g}" for name, value in row.items()), flush=True)
    return row


def by_number(rows: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """(seeds, numbers of experts) of one quantity; rows come seed by seed."""
    return np.array([row[key] for row in rows]).reshape(-1, len({row["num_experts"] for row in rows}))


def draw(rows: Sequence[dict[str, Any]], branches: int, path: Path) -> None:
    """Draws error and agreement over the number of experts."""
    errors = {MIXTURE: by_number(rows, "error"), DENSE: by_number(rows, "dense_error")}
    panels = {"held-out error": errors, "NMI (expert, branch)": {MIXTURE: by_number(rows, "nmi")}}
    plot_against_experts(panels, sorted({row["num_experts"] for row in rows}), branches, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = build_parser().parse_args(argv)
    args.lr, numbers = 1e-3, list(range(1, 2 * args.branches + 1))
    if args.quick:
        # All epochs stay, since with fewer steps nothing is learned and the dense network leads
        args.samples, args.seeds, args.lr = max(1, args.samples // 5), args.seeds[:1], 3e-3
        numbers = [1, args.branches, 2 * args.branches]
    args.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are small
    settings = {**vars(args), "output": str(args.output), "torch": torch.__version__}
    rows = []
    for seed in args.seeds:
        for num_experts in numbers:
            rows.append(train(num_experts, seed, args))
            table = {"settings": settings, "runs": rows}
            (args.output / "theorem2.json").write_text(json.dumps(table, indent=1) + "\n")
    draw(rows, args.branches, args.output / "theorem2.png")


if __name__ == "__main__":
    main()
