"""Measures time and memory of a step of training methods, beside those of ERM with the first model.

    python examples/method_costs.py --algorithms IRM Fish DANN --models gmoe_tiny_patch16 --img-size 64
    python examples/method_costs.py --num-domains 5 --batch-size 32 --mode train inference

Networks and methods take turns in each round. The table shows medians over rounds and quartiles of ratios. Steps of 160
images of 224 pixels, as in the second command, stand beside the costs that the papers state.

method_costs.csv has seconds and gigabytes of a step in GMoE's Table 16 and SF-MoE's Table 4, as printed. Neither paper
names its GPU. EoA is an ensemble of averaged networks; its row is that of one network with a moving average.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import timm
import torch
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext, get_algorithm, get_averaging
from timm_moe_dg.algorithms.adversarial import cycle_length
from timm_moe_dg.networks.build import check_name
from timm_moe_dg.networks.cost import interleaved, keep_freed_memory, peak_memory, quartiles, ratios, seconds_of
from timm_moe_dg.results.papers import with_tag

BASE = "ERM"
CLASSES = 7
IMAGES, PIXELS = 160, 224  # of a step whose cost the papers state
COSTS = pd.read_csv(Path(__file__).with_suffix(".csv"), dtype=str)
Step = Callable[[], None]


class Entry(NamedTuple):
    """A row of the table."""

    model: str
    algorithm: str  # followed by " + swad" for averaged weights
    mode: str = "train"  # or "inference"

    @property
    def repeats(self) -> int:
        """Steps until a method has done everything that it does."""
        method = get_algorithm(self.algorithm.partition(" + ")[0])
        return cycle_length(method.HPARAMS) if self.mode == "train" else 1


def build_steps(entry: Entry, args: argparse.Namespace) -> Step:
    """All of a method's steps, or a forward pass on the images of all domains."""
    torch.manual_seed(0)
    options = {"img_size": args.img_size} if args.img_size else {}
    network: nn.Module = timm.create_model(entry.model, num_classes=CLASSES, **options).to(args.device)
    method_name, _, averaging_name = entry.algorithm.partition(" + ")
    method = get_algorithm(method_name)
    averaging = get_averaging(averaging_name) if averaging_name else None
    average = averaging(network, averaging.HPARAMS) if averaging else None
    # The full penalty from the first step on; MLDG needs a domain to train on
    hparams = {key: 0 for key in method.HPARAMS if key.endswith("anneal_iters")}
    hparams |= {"n_meta_test": min(2, args.num_domains - 1)}
    algorithm = method(Setup(network, args.num_domains, CLASSES, hparams=hparams)).to(args.device)
    groups = [{"params": list(network.parameters())}, *algorithm.parameter_groups(1e-5, 0.0)]
    network.train(entry.mode == "train")
    context = StepContext(network, torch.optim.Adam(groups, lr=1e-5, fused=True))
    size = args.img_size or timm.data.resolve_model_data_config(network)["input_size"][-1]
    generator = torch.Generator().manual_seed(0)
    minibatches = [
        (
            torch.randn(args.batch_size, 3, size, size, generator=generator).to(args.device),
            torch.randint(CLASSES, (args.batch_size,), generator=generator).to(args.device),
        )
        for _ in range(args.num_domains)
    ]
    count = itertools.count()

    def train() -> None:
        for _ in range(entry.repeats):
            algorithm.update(context, minibatches)
            if average is not None:
                average.update(network, next(count))

    @torch.inference_mode()
    def infer() -> None:
        network(images)

    if entry.mode == "train":
        return train
    images = torch.cat([images for images, _ in minibatches])
    return infer


def stated_costs(entry: Entry) -> str:
    """The papers' costs of a step of 160 images, "" if they state none."""
    key = (entry.mode, entry.algorithm, with_tag(entry.model))
    rows = [cost for cost in COSTS.itertuples() if key == (cost.mode, cost.algorithm, with_tag(cost.model))]
    return "; ".join(f"{cost.seconds} s, {cost.gigabytes} GB ({cost.source})" for cost in rows)


def time_steps(entries: Sequence[Entry], args: argparse.Namespace) -> dict[Entry, list[float]]:
    """Seconds per step of every entry in every round."""
    timed = {entry: partial(seconds_of, build_steps(entry, args), args.device) for entry in entries}
    seconds = interleaved(timed, args.rounds, args.warmup)
    return {entry: [value / entry.repeats for value in seconds[entry]] for entry in entries}


def cells(entry: Entry, times: Sequence[float], base: Sequence[float], args: argparse.Namespace) -> list[str]:
    """One line of the table; `base` are the times of ERM with the first model."""
    low, middle, high = quartiles(ratios(times, base))
    peak = peak_memory(partial(build_steps, entry, args), args.device, args.cpu_threads) if args.memory else None
    memory = "" if peak is None else f"{peak:.0f}"
    # As many images and pixels as the papers' steps have
    is_papers = args.num_domains * args.batch_size == IMAGES and args.img_size in (None, PIXELS)
    costs = stated_costs(entry) if is_papers else ""
    seconds = f"{statistics.median(times) * 1e3:.0f}"
    return [entry.algorithm, entry.model, entry.mode, seconds, f"{middle:.2f} ({low:.2f}-{high:.2f})", memory, costs]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=["gmoe_small_patch16"], help="any timm models (default: %(default)s)")
    add("--algorithms", nargs="+", default=list(ALGORITHMS), help="methods beside ERM (default: all)")
    add("--averaging", nargs="+", default=[], help="also ERM with averaged weights: swad, moving")
    add("--mode", nargs="+", choices=["train", "inference"], default=["train"])
    add("--num-domains", type=int, default=3, help="training domains (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="images per domain (default: %(default)s)")
    add("--img-size", type=int, help="pixels (default: the model's)")
    add("--rounds", type=int, default=10, help="timed rounds (default: %(default)s)")
    add("--warmup", type=int, default=2, help="rounds before them (default: %(default)s)")
    add("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory")
    add("--cpu-threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Measures, and prints a table in Markdown."""
    args = parse(argv)
    names = dict.fromkeys([BASE, *args.algorithms, *(f"{BASE} + {name}" for name in args.averaging)])
    for check, given in ((check_name, args.models), (get_algorithm, args.algorithms), (get_averaging, args.averaging)):
        for name in given:
            check(name)
    torch.set_num_threads(args.cpu_threads)
    keep_freed_memory()
    columns = ["method", "model", "mode", "ms/step", "to ERM (quartiles)", "MiB", "papers"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for mode in args.mode:
        entries = [Entry(model, name, mode) for model, name in itertools.product(args.models, names)]
        times = time_steps(entries, args)
        for entry in entries:
            print(f"| {' | '.join(cells(entry, times[entry], times[entries[0]], args))} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
