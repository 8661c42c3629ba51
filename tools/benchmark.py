r"""Measures time and memory of models and training methods.

    timm-moe-dg benchmark models --models sfmoe_small moge_tiny \
        --batch-size 1 8 --mode inference train --memory
    timm-moe-dg benchmark methods --algorithms IRM Fish DANN \
        --models gmoe_tiny_patch16 --img-size 64
    timm-moe-dg benchmark models --device cuda --batch-size 128 \
        --mode inference train --amp-dtype float32 bfloat16 \
        --program eager compiled --implementation sorted grouped --table gpu.md

`models` compares each mixture with its dense twin, and with a dense model
that does as much arithmetic (FLOP-equivalent). `methods` compares training
steps with those of ERM, and steps of 160 images with the papers' costs.
Models take turns in each round. Tables show medians over rounds and quartiles
of ratios.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
from torch import nn
from torch.nn import functional as F

import timm_moe_dg
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, Setup, StepContext, get_algorithm, get_averaging
from timm_moe_dg.algorithms.adversarial import cycle_length
from timm_moe_dg.cli.arguments import add_device_option, parse_words
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import int_from_2, non_negative_int, output_file, positive_int
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import expert_implementation_info, set_expert_implementation
from timm_moe_dg.layers.experts import IMPLEMENTATIONS
from timm_moe_dg.measure.cost import (
    check_idle,
    count_macs,
    device_name,
    interleaved,
    keep_freed_memory,
    peak_memory,
    quartiles,
    ratios,
    seconds_of,
)
from timm_moe_dg.measure.dense_baselines import layer_and_baselines, mixture_layers, model_and_baselines, random_inputs
from timm_moe_dg.networks.build import check_name
from timm_moe_dg.protocols.run_identity import VERSIONS
from timm_moe_dg.results.papers import IMAGES, PIXELS, stated_costs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model, "compiled": torch.compile}
# Columns of the models' table: the varied settings, then the figures
CONDITIONS = ("mode", "dtype", "program", "implementation", "batch_size")
HEADINGS = ("M param", "GMACs", "ms", "ratio to it (quartiles)", "MiB (ratio)")
PRINTED = "{:40} {:9} {:8} {:8} {:8} {:>5} {:>8} {:>7} {:>9} {:>23} {:>13}"  # a line of that table
BASE = "ERM"
SOFTWARE = ", ".join(map(" ".join, VERSIONS.items()))
Row = dict[str, Any]
Step = Callable[[], None]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("benchmark.py", __doc__, "COMMAND [options]")
    commands = parser.add_subparsers(prog=parser.prog, dest="command", required=True, metavar="COMMAND")
    add_model_options(commands.add_parser("models", help="mixture models beside dense ones"))
    add_method_options(commands.add_parser("methods", help="training methods beside ERM"))
    return parser


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `models`."""
    add_common_options(parser, "mixture models of timm_moe_dg", mode="inference", rounds=20, warmup=3, memory=False)
    add = parser.add_argument
    add("--backbone", help="timm network that --models gmoe is made of (default: its own)")
    add("--against", help="any timm model to compare with, beside the dense twin and the FLOP-equivalent")
    add("--layer", action="store_true", help="measure the first mixture layer instead of the model")
    add("--batch-size", nargs="+", type=positive_int, default=[8], metavar="N", help="images per forward (default: 8)")
    add("--img-size", nargs="+", type=positive_int, default=[None], metavar="N", help="pixels (default: the model's)")
    for option, counted in (("--num-experts", "experts per layer"), ("--top-k", "experts per token")):
        add(option, nargs="+", type=positive_int, default=[None], metavar="N", help=f"{counted} (default: the model's)")
    dtypes = "mixed precision; float32 is without (default: float32)"
    add("--amp-dtype", dest="dtype", nargs="+", choices=list(DTYPES), default=["float32"], help=dtypes)
    add("--program", nargs="+", choices=list(PROGRAMS), default=["eager"], help="eager mode or torch.compile")
    how = "implementation of the experts, see timm_moe_dg.layers.set_expert_implementation (default: %(default)s)"
    add("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=["auto"], help=how)
    add("--glibc-defaults", action="store_true", help="let the C library return freed memory to the system")
    add("--table", type=output_file, metavar="MD", help="file for the table, in Markdown")


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `methods`."""
    add_common_options(parser, "any timm models", mode="train", rounds=10, warmup=2, memory=True)
    add = parser.add_argument
    beside = "methods to measure beside ERM (default: all)"
    add("--algorithms", nargs="+", default=list(ALGORITHMS), metavar="NAME", help=beside)
    averaged = f"also measure ERM with averaged weights: {', '.join(AVERAGING)}"
    add("--averaging", nargs="+", default=[], metavar="NAME", help=averaged)
    add("--num-domains", type=positive_int, default=3, metavar="N", help="training domains (default: %(default)s)")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="images per domain (default: %(default)s)")
    add("--img-size", type=positive_int, metavar="N", help="pixels (default: the model's)")
    add("--num-classes", type=positive_int, default=7, metavar="N", help="classes (default: %(default)s)")
    add("--amp-dtype", choices=["bfloat16", "float16"], help="mixed precision (default: off)")


def add_common_options(
    parser: argparse.ArgumentParser, models: str, mode: str, rounds: int, warmup: int, memory: bool
) -> None:
    """Adds what both commands have, with their defaults; `models` says what --models takes."""
    add = parser.add_argument
    models += " (default: gmoe_small_patch16)"
    add("--models", nargs="+", default=["gmoe_small_patch16"], metavar="NAME", help=models)
    modes = f"what is timed (default: {mode})"
    add("--mode", nargs="+", choices=["inference", "train"], default=[mode], help=modes)
    add("--rounds", type=int_from_2, default=rounds, metavar="N", help="timed rounds, 2 or more (default: %(default)s)")
    before = "rounds before them (default: %(default)s)"
    add("--warmup", type=non_negative_int, default=warmup, metavar="N", help=before)
    peak = "measure peak memory (on a CPU: Linux only; default: %(default)s)"
    add("--memory", action=argparse.BooleanOptionalAction, default=memory, help=peak)
    threads = torch.get_num_threads()
    add("--cpu-threads", type=positive_int, default=threads, metavar="N", help="CPU threads (default: %(default)s)")
    add_device_option(add)
    add("--output", type=output_file, metavar="JSON", help="file for the figures")


def autocast(device: str, dtype: str | None) -> torch.autocast:
    """Mixed precision of a type; none for float32."""
    kind = torch.device(device).type
    return torch.autocast(kind, DTYPES[dtype or "float32"], enabled=dtype not in (None, "float32"))


def save(args: argparse.Namespace, rows: Sequence[Row], **machine: str) -> None:
    """Writes the figures, the options and what they were measured on."""
    if args.output:
        machine |= {key: str(value) for key, value in vars(args).items()}
        args.output.write_text(json.dumps({"machine": {"versions": VERSIONS, **machine}, "rows": rows}, indent=2))


def check_models(args: argparse.Namespace) -> None:
    """Checks before anything is measured that every model can be built, and has mixture layers."""
    for name in filter(None, (*args.models, args.against)):
        check_name(name)
    if args.backbone and args.models != ["gmoe"]:
        raise ArgumentError.of("backbone", args.backbone, "goes with --models gmoe alone")
    for name in args.models:
        mixture_layers(timm.create_model(name, device="meta"))
    for setting in settings_of(args):
        timm.create_model(setting["model"], device="meta", **setting["options"])


def settings_of(args: argparse.Namespace) -> list[Row]:
    """Every combination of the command line's lists."""
    sizes = ("img_size", "num_experts", "top_k")
    settings = []
    for values in itertools.product(*(vars(args)[name] for name in ("models", *sizes, *CONDITIONS))):
        setting = dict(zip(("model", *sizes, *CONDITIONS), values, strict=True))
        options = {"backbone": args.backbone, **{name: setting.pop(name) for name in sizes}}
        given = {name: value for name, value in options.items() if value}
        settings.append({"model": setting.pop("model"), "options": given, **setting})
    return settings


def makers_of(setting: Row, args: argparse.Namespace) -> dict[str, Callable[[], nn.Module]]:
    """By label, functions that build a setting's mixture and what it is compared with."""
    if args.layer:
        return layer_and_baselines(setting["model"], setting["options"])
    return model_and_baselines(setting["model"], setting["options"], args.against)


def model_step(model: nn.Module, setting: Row, args: argparse.Namespace) -> Step:
    """Inference, or forward, auxiliary loss, backward and (for a whole model) fused Adam."""
    mode, dtype = setting["mode"], setting["dtype"]
    inputs = random_inputs(model, setting["model"], setting["options"], setting["batch_size"], args.device)
    model = model.to(args.device).train(mode == "train")
    set_expert_implementation(model, setting["implementation"])
    forward = PROGRAMS[setting["program"]](model)
    target = torch.arange(len(inputs[0]), device=args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def infer() -> None:
        with torch.inference_mode(), autocast(args.device, dtype):
            forward(*inputs)

    def train() -> None:
        optimizer.zero_grad()  # before the forward, as a training loop that saves memory does
        inputs[0].grad = None  # the gradient of a layer's input would be added to the last step's
        with autocast(args.device, dtype):
            output = forward(*inputs).float()
            task = output.square().mean() if args.layer else F.cross_entropy(output, target % output.shape[1])
            loss = task + 0.01 * timm_moe_dg.auxiliary_loss(model)
        loss.backward()
        if not args.layer:
            optimizer.step()

    return train if mode == "train" else infer


def build_model_step(setting: Row, label: str, args: argparse.Namespace) -> Step:
    """One of a setting's models, and its step."""
    return model_step(makers_of(setting, args)[label](), setting, args)


def measure_models(setting: Row, args: argparse.Namespace) -> list[Row]:
    """One row per model: the mixture, its dense twin, the FLOP-equivalent, and the model of --against."""
    models = {label: make().to(args.device) for label, make in makers_of(setting, args).items()}
    macs, timed = {}, {}
    for label, model in models.items():
        sample = random_inputs(model, setting["model"], setting["options"], 1, args.device)
        macs[label] = count_macs(model, [part.detach() for part in sample])
        timed[label] = partial(seconds_of, model_step(model, setting, args), args.device)
    seconds = interleaved(timed, args.rounds, args.warmup)
    eager = setting["program"] == "eager"  # a compiled program has no eager forward
    return [
        {
            **setting,
            "taken": sorted({used for used in expert_implementation_info(model).values() if used and eager}),
            "against": label,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "gmacs": macs[label] / 1e9,
            "seconds": statistics.median(seconds[label]),
            "ratio": quartiles(ratios(seconds[setting["model"]], seconds[label])),
            "peak_mib": measured_memory(partial(build_model_step, setting, label, args), args),
        }
        for label, model in models.items()
    ]


def measured_memory(build: Callable[[], Step], args: argparse.Namespace) -> float | None:
    """Peak memory in MiB, or None without --memory."""
    return peak_memory(build, args.device, args.cpu_threads) if args.memory else None


def model_cells(row: Row, mixture: Row) -> list[str]:
    """One line of the models' table; `mixture` is the row of the mixture model itself."""
    is_mixture = row is mixture
    options = "".join(f" {key}={value}" for key, value in row["options"].items()) if is_mixture else ""
    low, middle, high = row["ratio"]
    ratio = "" if is_mixture else f"{middle:.3f} ({low:.3f}-{high:.3f})"
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    if memory and not is_mixture:
        memory += f" ({mixture['peak_mib'] / row['peak_mib']:.2f})"
    label = f"{row['model']}{options}" if is_mixture else f"  {row['against']}"
    numbers = [f"{row['parameters'] / 1e6:.2f}", f"{row['gmacs']:.3f}", f"{row['seconds'] * 1e3:.2f}"]
    return [label, *(str(row[name]) for name in CONDITIONS), *numbers, ratio, memory]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; the first line is its heading."""
    head, *rest = ([cell.replace("  ", "&nbsp;&nbsp;") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest)) + "\n"


def report_models(args: argparse.Namespace) -> None:
    """Measures models, prints a table, writes it and a picture."""
    check_models(args)
    if not args.glibc_defaults:
        # Otherwise page faults decide, above all those of the dense models
        keep_freed_memory()
    where = f"{SOFTWARE}, {device_name(args.device)}, {args.cpu_threads} threads, {args.rounds} rounds"
    lines = [["model", *CONDITIONS[:-1], "batch", *HEADINGS]]
    print(f"{where}\n{PRINTED.format(*lines[0]).rstrip()}")
    rows: list[Row] = []
    for setting in settings_of(args):
        measured = measure_models(setting, args)
        lines += [model_cells(row, measured[0]) for row in measured]
        print("\n".join(PRINTED.format(*line).rstrip() for line in lines[-len(measured) :]), flush=True)
        rows += measured
    save(args, rows, name=device_name(args.device))
    if args.table:
        args.table.write_text(f"{where}\n\n{markdown(lines)}")


class Entry(NamedTuple):
    """A row of the methods' table."""

    model: str
    algorithm: str  # followed by " + swad" for averaged weights
    mode: str = "train"  # or "inference"

    @property
    def repeats(self) -> int:
        """Steps until a method has done everything that it does."""
        method = get_algorithm(self.algorithm.partition(" + ")[0])
        return cycle_length(method.HPARAMS) if self.mode == "train" else 1


def make_network(model: str, args: argparse.Namespace) -> nn.Module:
    """The network that every method starts from."""
    torch.manual_seed(0)
    options = {"img_size": args.img_size} if args.img_size else {}
    return timm.create_model(model, num_classes=args.num_classes, **options).to(args.device)


def method_step(entry: Entry, network: nn.Module, args: argparse.Namespace) -> Step:
    """One training step of a method, or a forward pass on the images of all domains."""
    method_name, _, averaging_name = entry.algorithm.partition(" + ")
    method = get_algorithm(method_name)
    averaging = get_averaging(averaging_name) if averaging_name else None
    average = averaging(network, averaging.HPARAMS) if averaging else None
    # The full penalty from the first step on; MLDG needs a domain to train on
    hparams = {key: 0 for key in method.HPARAMS if key.endswith("anneal_iters")}
    hparams |= {"n_meta_test": min(2, args.num_domains - 1)}
    algorithm = method(Setup(network, args.num_domains, args.num_classes, hparams=hparams)).to(args.device)
    groups = [{"params": list(network.parameters())}, *algorithm.parameter_groups(1e-5, 0.0)]
    network.train(entry.mode == "train")
    network.forward = autocast(args.device, args.amp_dtype)(network.forward)  # as accelerate prepares it
    mixed_precision = partial(autocast, args.device, args.amp_dtype)
    context = StepContext(network, torch.optim.Adam(groups, lr=1e-5, fused=True), autocast=mixed_precision)
    size = args.img_size or timm.data.resolve_model_data_config(network)["input_size"][-1]
    generator = torch.Generator().manual_seed(0)
    minibatches = [
        (
            torch.randn(args.batch_size, 3, size, size, generator=generator).to(args.device),
            torch.randint(args.num_classes, (args.batch_size,), generator=generator).to(args.device),
        )
        for _ in range(args.num_domains)
    ]
    count = itertools.count()

    def train() -> None:
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


def build_method_step(entry: Entry, args: argparse.Namespace) -> Step:
    """A network and all of a method's steps."""
    step = method_step(entry, make_network(entry.model, args), args)

    def steps() -> None:
        for _ in range(entry.repeats):
            step()

    return steps


def time_methods(entries: Sequence[Entry], args: argparse.Namespace) -> dict[Entry, list[float]]:
    """Seconds per step of every entry in every round."""
    timed = {entry: partial(seconds_of, build_method_step(entry, args), args.device) for entry in entries}
    seconds = interleaved(timed, args.rounds, args.warmup)
    return {entry: [value / entry.repeats for value in seconds[entry]] for entry in entries}


def measure_methods(args: argparse.Namespace, mode: str) -> list[Row]:
    """One row per network and method, ERM with the first network first."""
    averaged = [f"{BASE} + {name}" for name in args.averaging]
    names = [BASE, *(name for name in args.algorithms if name != BASE), *averaged]
    entries = [Entry(model, name, mode) for model, name in itertools.product(args.models, names)]
    times = time_methods(entries, args)
    return [
        {
            **entry._asdict(),
            "seconds": statistics.median(times[entry]),
            "ratio": quartiles(ratios(times[entry], times[entries[0]])),
            "peak_mib": measured_memory(partial(build_method_step, entry, args), args),
            "papers": stated_costs(mode, entry.algorithm, entry.model) if is_papers_step(args) else None,
        }
        for entry in entries
    ]


def is_papers_step(args: argparse.Namespace) -> bool:
    """Whether a step has as many images and pixels as the papers' steps."""
    return args.num_domains * args.batch_size == IMAGES and args.img_size in (None, PIXELS)


def method_line(row: Row, base: Row) -> str:
    """One line of the methods' table, in Markdown; `base` is ERM's row."""
    low, middle, high = row["ratio"]
    ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
    cells = [row["algorithm"], row["model"], row["mode"], f"{row['seconds'] * 1e3:.0f}", ratio]
    if row["peak_mib"] is not None:
        cells += [f"{row['peak_mib']:.0f}", f"{row['peak_mib'] / base['peak_mib']:.2f}"]
    cells += [] if row["papers"] is None else [row["papers"]]
    return f"| {' | '.join(cells)} |"


def report_methods(args: argparse.Namespace) -> None:
    """Measures training methods and prints a table."""
    checks = {"models": check_name, "algorithms": get_algorithm, "averaging": get_averaging}
    for option, check in checks.items():
        for name in vars(args)[option]:
            check(name)
    images, precision = f"{args.num_domains} x {args.batch_size} images", args.amp_dtype or "float32"
    print(f"{', '.join(args.models)}, {images}, {args.device}, {args.cpu_threads} threads, {precision}")
    print(SOFTWARE)
    columns = ["method", "model", "mode", "ms/step", "to ERM (quartiles)", *(["MiB", "to ERM"] if args.memory else [])]
    columns += ["papers"] if is_papers_step(args) else []
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    rows = []
    for mode in args.mode:
        measured = measure_methods(args, mode)
        print("\n".join(method_line(row, measured[0]) for row in measured), flush=True)
        rows += measured
    save(args, rows)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    args = parse_words(build_parser(), argv)
    check_idle(args.device)
    torch.set_num_threads(args.cpu_threads)
    (report_models if args.command == "models" else report_methods)(args)


if __name__ == "__main__":
    main()
