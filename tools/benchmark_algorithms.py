"""Step time and peak memory of every training method relative to ERM, interleaved so that a noisy machine cancels.

    python tools/benchmark_algorithms.py                                    # gmoe_small_patch16, 3 domains of 8 images
    python tools/benchmark_algorithms.py --algorithm IRM Fish DANN --model gmoe_tiny_patch16 --img-size 64
    python tools/benchmark_algorithms.py --device cuda --amp-dtype bfloat16 --batch-size 32 --output gpu.json

The rows of GMoE's Table 16 (160 images) and of SF-MoE's Table 4, networks beside each other:

    python tools/benchmark_algorithms.py --device cuda --domains 5 --batch-size 32 --mode train inference \
        --model resnet50.tv_in1k deit_small_patch16_224 gmoe_small_patch16 \
        --algorithm ERM DANN IRM Fish Fishr --averaging swad --output table16.json
    python tools/benchmark_algorithms.py --device cuda --domains 5 --batch-size 32 --output table4.json \
        --model resnet50.tv_in1k vit_small_r26_s32_224 sfmoe_small hybrid_sfmoe_r26_s16 \
        --algorithm ERM DANN IRM Fish Fishr --averaging swad moving

Every method trains a copy of each network on the same random images, with its default hyper-parameters and its
penalty from the first step on. Rounds go A B C A B C; each ratio, to ERM with the first network, is taken within a
round, and the median over rounds is shown with its quartiles. A step of DANN is the mean of the network's turn and the
discriminator's. Peak memory is measured in a process of its own for each method: allocated on a GPU, resident beyond
the imports on a CPU (Linux).
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, Setup, StepContext, get_algorithm, get_averaging
from timm_moe_dg.cli.arguments import (
    int_from_2,
    non_negative_int,
    output_file,
    parse_words,
    positive_int,
    usable_device,
)
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.measure.memory import peak_memory
from timm_moe_dg.measure.timing import interleaved, quartiles, ratios, seconds_of
from timm_moe_dg.networks.build import check_name

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BASE = "ERM"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", default=["gmoe_small_patch16"], help="any timm models (%(default)s)")
    add("--algorithm", nargs="+", default=list(ALGORITHMS), help="methods to measure beside ERM (default: all)")
    add(
        "--averaging",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"ERM with weights averaged, of {', '.join(AVERAGING)}",
    )
    add("--mode", nargs="+", choices=["train", "inference"], default=["train"], help="what is timed (%(default)s)")
    add("--domains", type=positive_int, default=3, help="training domains (%(default)s)")
    add("--batch-size", type=positive_int, default=8, help="images per domain (%(default)s)")
    add("--img-size", type=positive_int, help="pixels (default: the model's own)")
    add("--num-classes", type=positive_int, default=7, help="classes (%(default)s)")
    add("--rounds", type=int_from_2, default=10, help="timed rounds, 2 or more (%(default)s)")
    add("--warmup", type=non_negative_int, default=2, help="rounds before them (%(default)s)")
    add("--no-memory", dest="memory", action="store_false", help="leave the peak memory out")
    add("--threads", type=positive_int, default=torch.get_num_threads(), help="CPU threads (%(default)s)")
    add("--device", type=usable_device, default="cpu", help="torch device, such as cuda (%(default)s)")
    add("--amp-dtype", choices=list(DTYPES), help="automatic mixed precision (default: off)")
    add("--output", type=output_file, metavar="JSON", help="file for the figures")
    return parser


class Autocast(nn.Module):
    """A network whose forward passes run in mixed precision, as a launcher wraps it.

    Args:
        network: Any.
        device: Its device.
        dtype: None for no mixed precision.
    """

    def __init__(self, network: nn.Module, device: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        self.options: dict[str, Any] = {
            "device_type": torch.device(device).type,
            "dtype": dtype,
            "enabled": dtype is not None,
        }

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        with torch.autocast(**self.options):
            return self.network(images)


class Entry(NamedTuple):
    """What is measured.

    Attributes:
        model: A timm model.
        algorithm: The training method, with " + swad" where weights are averaged so.
        mode: "train" or "inference".
    """

    model: str
    algorithm: str
    mode: str = "train"


def make_step(name: str, network: nn.Module, args: argparse.Namespace, mode: str = "train") -> Callable[[], None]:
    """What is timed: one step of a method, or a forward pass of what it trains on the images of all domains."""
    method_name, _, averaging_name = name.partition(" + ")
    method = get_algorithm(method_name)
    averaging = get_averaging(averaging_name) if averaging_name else None
    average = averaging(network, averaging.HPARAMS) if averaging else None
    # The penalty from the first step on; MLDG needs a domain to train on
    hparams = {key: 0 for key in method.HPARAMS if key.endswith("anneal_iters")}
    hparams |= {"n_meta_test": min(2, args.domains - 1)}
    algorithm = method(Setup(network, args.domains, args.num_classes, hparams, aux_coef=0.01)).to(args.device)
    groups = [{"params": list(network.parameters())}, *algorithm.parameter_groups(1e-5, 0.0)]
    wrapped = Autocast(network.train(), args.device, DTYPES.get(args.amp_dtype))
    context = StepContext(wrapped, torch.optim.Adam(groups, lr=1e-5, fused=True))
    size = args.img_size or timm.data.resolve_model_data_config(network)["input_size"][-1]
    generator = torch.Generator().manual_seed(0)
    minibatches = [
        (
            torch.randn(args.batch_size, 3, size, size, generator=generator).to(args.device),
            torch.randint(args.num_classes, (args.batch_size,), generator=generator).to(args.device),
        )
        for _ in range(args.domains)
    ]

    def step() -> None:
        algorithm.update(context, minibatches)
        if average is not None:
            average.update(network, next(count))

    @torch.inference_mode()
    def infer() -> None:
        wrapped(images)

    if mode == "inference":
        wrapped.eval()
        images = torch.cat([minibatch[0] for minibatch in minibatches])
        return infer
    count = itertools.count()
    return step


def turns(name: str) -> int:
    """Steps after which a method has done everything it does."""
    return 1 + int(get_algorithm(name.partition(" + ")[0]).HPARAMS.get("d_steps_per_g_step", 0))


def make_network(model: str, args: argparse.Namespace) -> nn.Module:
    """The network that every method starts from."""
    torch.manual_seed(0)
    options = {"img_size": args.img_size} if args.img_size else {}
    return timm.create_model(model, num_classes=args.num_classes, **options).to(args.device)


def measure_times(entries: Sequence[Entry], args: argparse.Namespace) -> dict[Entry, list[float]]:
    """Seconds per step of every entry in every round."""
    networks = {model: make_network(model, args) for model in {entry.model for entry in entries}}
    timed = {}
    for number, (model, name, mode) in enumerate(entries):
        step = make_step(name, deepcopy(networks[model]), args, mode)
        timed[str(number)] = partial(seconds_of, step, args.device, repeats(entries[number]))
    times = interleaved(timed, args.rounds, args.warmup)
    return {entry: times[str(number)] for number, entry in enumerate(entries)}


def repeats(entry: Entry) -> int:
    """Steps that are timed together."""
    return turns(entry.algorithm) if entry.mode == "train" else 1


def build_step(entry: Entry, args: argparse.Namespace) -> Callable[[], None]:
    """A whole turn of a method on a network of its own."""
    step = make_step(entry.algorithm, make_network(entry.model, args), args, entry.mode)

    def turn() -> None:
        for _ in range(repeats(entry)):
            step()

    return turn


def measure(args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """One row per network and method, ERM with the first network first."""
    averaged = [f"{BASE} + {name}" for name in args.averaging]
    names = [BASE, *(name for name in args.algorithm if name != BASE), *averaged]
    entries = [Entry(model, name, mode) for model, name in itertools.product(args.model, names)]
    times, on = measure_times(entries, args), {"device": args.device, "threads": args.threads}
    rows = []
    for entry in entries:
        ratio = quartiles(ratios(times[entry], times[entries[0]]))
        row = {**entry._asdict(), "seconds": statistics.median(times[entry]), "ratio": ratio}
        row["peak_mib"] = peak_memory(build_step, entry, args, **on) if args.memory else None
        rows.append(row)
    return rows


def table_line(row: dict[str, Any], base: dict[str, Any]) -> str:
    """One line of the printed Markdown table; `base` is ERM's row."""
    low, middle, high = row["ratio"]
    cells = [
        row["algorithm"],
        row["model"],
        row["mode"],
        f"{row['seconds'] * 1e3:.0f}",
        f"{middle:.2f} ({low:.2f}-{high:.2f})",
    ]
    if row["peak_mib"] is not None:
        cells += [f"{row['peak_mib']:.0f}", f"{row['peak_mib'] / base['peak_mib']:.2f}"]
    return f"| {' | '.join(cells)} |"


def report(args: argparse.Namespace) -> None:
    """Measures, prints a table, writes JSON."""
    torch.set_num_threads(args.threads)
    for model in args.model:
        check_name(model)
    for name in args.algorithm:
        get_algorithm(name)
    for name in args.averaging:
        get_averaging(name)
    images = f"{args.domains} x {args.batch_size} images"
    precision = args.amp_dtype or "float32"
    print(f"{', '.join(args.model)}, {images}, {args.device}, {args.threads} threads, {precision}")
    print(f"torch {torch.__version__}")
    memory = " MiB | to ERM |" if args.memory else ""
    heading = f"| method | model | mode | ms/step | to ERM (quartiles) |{memory}\n|{'---|' * (7 if args.memory else 5)}"
    print(heading)
    rows = []
    for mode in args.mode:
        new = measure(args, mode)
        print("\n".join(table_line(row, new[0]) for row in new), flush=True)
        rows += new
    if args.output:
        machine = {"torch": torch.__version__, **{key: str(value) for key, value in vars(args).items()}}
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    report(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
