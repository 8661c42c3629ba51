"""One image and many experts: how long the experts take beside a mere reading of the weights of all that are visited.

    python -m tests.scale.expert_floor
    python -m tests.scale.expert_floor --num-experts 16 --dtype bfloat16 --threads 1

Reading is a sum over the visited experts' weights, which uses every byte once; whatever is faster does not read them.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from timm_moe_dg.layers import set_dispatch
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.measure.cost import device_name, interleaved, keep_freed_memory, quartiles, ratios, seconds_of

TOKENS, TOP_K, FEATURES, HIDDEN = 197, 2, 384, 1536  # one image in gmoe_small_patch16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def visits(num_experts: int) -> Tensor:
    """(TOKENS, TOP_K) different experts of each token, drawn evenly."""
    return torch.rand(TOKENS, num_experts).topk(TOP_K).indices


def make_steps(num_experts: int, dtype: torch.dtype) -> tuple[int, dict[str, Callable[[], object]]]:
    """Bytes of the visited experts' weights; reading them, and the experts' forward by each dispatch."""
    experts = StackedExperts(num_experts, FEATURES, HIDDEN, dtype=dtype).eval()
    indices = visits(num_experts)
    x, weights = torch.randn(TOKENS, FEATURES, dtype=dtype), torch.rand(TOKENS, TOP_K, dtype=dtype)
    visited = [one for stack in (experts.fc1, experts.fc2) for one in stack.weight.detach()[indices.unique()].unbind()]

    def compute(dispatch: str) -> None:
        set_dispatch(experts, dispatch)
        with torch.inference_mode():
            experts(x, indices, weights)

    steps: dict[str, Callable[[], object]] = {"reading": lambda: [one.sum() for one in visited]}
    steps |= {dispatch: partial(compute, dispatch) for dispatch in ("sorted", "grouped", "loop")}
    return sum(one.nbytes for one in visited), steps


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="tests.scale.expert_floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-experts", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    size, steps = make_steps(args.num_experts, DTYPES[args.dtype])
    seconds = interleaved({name: partial(seconds_of, step) for name, step in steps.items()}, args.rounds, 3)
    where = f"torch {torch.__version__}, {device_name('cpu')}, {args.threads} threads, {args.dtype}"
    sys.stdout.write(f"{where}: {args.num_experts} experts, {size / 2**20:.0f} MiB of visited weights\n")
    for name, values in seconds.items():
        low, middle, high = quartiles(ratios(values, seconds["reading"]))
        rate = size / statistics.median(values) / 1e9
        sys.stdout.write(f"{name:8} {1e3 * statistics.median(values):7.2f} ms, {rate:5.1f} GB/s, ")
        sys.stdout.write(f"{middle:.2f} ({low:.2f}-{high:.2f}) of reading\n")


if __name__ == "__main__":
    main()
