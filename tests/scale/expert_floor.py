"""Floors of a mixture layer's time: reading the experts' weights, and their matrix products alone.

    python -m tests.scale.expert_floor  # one image and 64 experts
    python -m tests.scale.expert_floor --num-experts 16 --dtype bfloat16 --threads 1
    python -m tests.scale.expert_floor --num-experts 6 --tokens 136 --against dense  # 8 images of 64 pixels

Reading is a sum over the visited experts' weights, which uses every byte once. A faster way does not read them all.
"Products" multiplies each expert's rows, without routing, gathering and activation. "Dense" makes the two products of
a dense layer with as many multiplications. In training, both are followed by the products of the backward pass.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from timm_moe_dg.layers import set_expert_implementation
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.measure.cost import device_name, interleaved, keep_freed_memory, quartiles, ratios, seconds_of

TOP_K, FEATURES, HIDDEN = 2, 384, 1536  # of gmoe_small_patch16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def visits(tokens: int, num_experts: int) -> Tensor:
    """(tokens, TOP_K) different experts of each token, drawn evenly."""
    return torch.rand(tokens, num_experts).topk(TOP_K).indices


@torch.inference_mode()
def multiply(x: Tensor, weight1: Tensor, weight2: Tensor, backward: bool = False) -> None:
    """(T, D) through (H, D) and (D, H); with `backward`, also the four products that give all gradients."""
    hidden = x @ weight1.T
    outputs = hidden @ weight2.T
    if backward:
        _ = (outputs @ weight2, outputs.T @ hidden, hidden @ weight1, hidden.T @ x)


def product_steps(experts: StackedExperts, x: Tensor, indices: Tensor) -> dict[str, Callable[[], object]]:
    """The products of experts beside those of a dense layer with TOP_K times the hidden features."""
    weights1, weights2 = experts.fc1.weight.detach(), experts.fc2.weight.detach()
    rows = [x[(indices == expert).any(1)].clone() for expert in range(len(weights1))]
    wide1, wide2 = weights1[:TOP_K].flatten(0, 1).clone(), torch.cat(list(weights2[:TOP_K]), dim=1)

    def separate(backward: bool) -> None:
        for part, weight1, weight2 in zip(rows, weights1, weights2, strict=True):
            multiply(part, weight1, weight2, backward)

    return {
        "dense": partial(multiply, x, wide1, wide2),
        "products": partial(separate, backward=False),
        "dense, training": partial(multiply, x, wide1, wide2, backward=True),
        "products, training": partial(separate, backward=True),
    }


def make_steps(tokens: int, num_experts: int, dtype: torch.dtype) -> tuple[int, dict[str, Callable[[], object]]]:
    """Bytes of the visited experts' weights; reading them, the experts' forward by implementation, and products."""
    experts = StackedExperts(num_experts, FEATURES, HIDDEN, dtype=dtype).eval()
    indices = visits(tokens, num_experts)
    x, weights = torch.randn(tokens, FEATURES, dtype=dtype), torch.rand(tokens, TOP_K, dtype=dtype)
    visited = [one for stack in (experts.fc1, experts.fc2) for one in stack.weight.detach()[indices.unique()].unbind()]

    def compute(implementation: str) -> None:
        set_expert_implementation(experts, implementation)
        with torch.inference_mode():
            experts(x, indices, weights)

    steps: dict[str, Callable[[], object]] = {"reading": lambda: [one.sum() for one in visited]}
    steps |= {implementation: partial(compute, implementation) for implementation in ("sorted", "grouped", "loop")}
    steps |= product_steps(experts, x, indices)
    return sum(one.nbytes for one in visited), steps


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="tests.scale.expert_floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=197, help="(default: those of one image)")
    names = ("reading", "dense", "dense, training")
    parser.add_argument("--against", choices=names, default="reading", help="row to compare with (default: reading)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    size, steps = make_steps(args.tokens, args.num_experts, DTYPES[args.dtype])
    seconds = interleaved({name: partial(seconds_of, step) for name, step in steps.items()}, args.rounds, 3)
    where = f"torch {torch.__version__}, {device_name('cpu')}, {args.threads} threads, {args.dtype}"
    work = f"{args.tokens} tokens, {args.num_experts} experts, {size / 2**20:.0f} MiB of visited weights"
    sys.stdout.write(f"{where}: {work}\n")
    for name, values in seconds.items():
        low, middle, high = quartiles(ratios(values, seconds[args.against]))
        rate = size / statistics.median(values) / 1e9
        sys.stdout.write(f"{name:18} {1e3 * statistics.median(values):7.2f} ms, {rate:5.1f} GB/s, ")
        sys.stdout.write(f"{middle:.2f} ({low:.2f}-{high:.2f}) of {args.against}\n")


if __name__ == "__main__":
    main()
