r"""Measures time, memory and arithmetic of mixtures beside dense models.

    timm-moe-dg benchmark models --models sfmoe_small moge_tiny \
        --batch-size 1 8 --mode inference train --memory
    timm-moe-dg benchmark models --device cuda --batch-size 128 \
        --mode inference train --amp-dtype float32 bfloat16 \
        --program eager compiled

Each mixture is compared with its dense twin, and with a dense model that does
as much arithmetic (FLOP-equivalent). They take turns in each round. The table
shows medians over rounds and quartiles of ratios.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional as F

import timm_moe_dg
from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import int_from_2, non_negative_int, output_file, positive_int
from timm_moe_dg.errors import ArgumentError, check_name
from timm_moe_dg.layers import expert_implementation_info, set_expert_implementation
from timm_moe_dg.layers.experts import IMPLEMENTATIONS
from timm_moe_dg.networks.cost import (
    count_macs,
    device_name,
    interleaved,
    keep_freed_memory,
    mixture_and_baselines,
    mixture_layers,
    peak_memory,
    quartiles,
    random_inputs,
    ratios,
    seconds_of,
)
from timm_moe_dg.protocols.run_identity import VERSIONS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model, "compiled": torch.compile}
# Columns of the table: the varied settings, then the figures
CONDITIONS = ("mode", "dtype", "program", "implementation", "batch_size")
HEADINGS = ("M param", "GMACs", "ms", "ratio to it (quartiles)", "MiB (ratio)")
Row = dict[str, Any]
Step = Callable[[], None]


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("benchmark.py", __doc__, "models [options]")
    commands = parser.add_subparsers(prog=parser.prog, dest="command", required=True, metavar="models")
    add = commands.add_parser("models", help="mixtures beside dense models").add_argument
    names = "mixtures of timm_moe_dg (default: gmoe_small_patch16)"
    add("--models", nargs="+", default=["gmoe_small_patch16"], metavar="NAME", help=names)
    add("--backbone", help="timm network that --models gmoe is made of (default: its own)")
    modes = "what is timed (default: inference)"
    add("--mode", nargs="+", choices=["inference", "train"], default=["inference"], help=modes)
    add("--batch-size", nargs="+", type=positive_int, default=[8], metavar="N", help="images per forward (default: 8)")
    add("--img-size", nargs="+", type=positive_int, default=[None], metavar="N", help="pixels (default: the model's)")
    for option, counted in (("--num-experts", "experts per layer"), ("--top-k", "experts per token")):
        add(option, nargs="+", type=positive_int, default=[None], metavar="N", help=f"{counted} (default: the model's)")
    dtypes = "mixed precision; float32 is without (default: float32)"
    add("--amp-dtype", dest="dtype", nargs="+", choices=list(DTYPES), default=["float32"], help=dtypes)
    add("--program", nargs="+", choices=list(PROGRAMS), default=["eager"], help="eager mode or torch.compile")
    how = "implementation of the experts, see timm_moe_dg.layers.set_expert_implementation (default: %(default)s)"
    add("--implementation", nargs="+", choices=IMPLEMENTATIONS, default=["auto"], help=how)
    add("--rounds", type=int_from_2, default=20, metavar="N", help="timed rounds, 2 or more (default: %(default)s)")
    before = "rounds before them (default: %(default)s)"
    add("--warmup", type=non_negative_int, default=3, metavar="N", help=before)
    add("--memory", action="store_true", help="measure peak memory too (on a CPU: Linux only)")
    threads = torch.get_num_threads()
    add("--cpu-threads", type=positive_int, default=threads, metavar="N", help="CPU threads (default: %(default)s)")
    add_device_option(add)
    add("--output", type=output_file, metavar="JSON", help="file for the figures")
    return parser


def check_models(args: argparse.Namespace) -> None:
    """Checks before anything is measured that every model can be built, and has mixture layers."""
    for name in args.models:
        check_name(name)
    if args.backbone and args.models != ["gmoe"]:
        raise ArgumentError.of("backbone", args.backbone, "goes with --models gmoe alone")
    for setting in settings_of(args):
        mixture_layers(timm.create_model(setting["model"], device="meta", **setting["options"]))


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


def model_step(model: nn.Module, setting: Row, args: argparse.Namespace) -> Step:
    """Inference, or forward, auxiliary loss, backward and fused Adam."""
    mode, dtype = setting["mode"], DTYPES[setting["dtype"]]
    inputs = random_inputs(model, setting["batch_size"], args.device)
    model = model.to(args.device).train(mode == "train")
    set_expert_implementation(model, setting["implementation"])
    forward = PROGRAMS[setting["program"]](model)
    target = torch.arange(len(inputs[0]), device=args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
    autocast = partial(torch.autocast, torch.device(args.device).type, dtype, enabled=dtype != torch.float32)

    def infer() -> None:
        with torch.inference_mode(), autocast():
            forward(*inputs)

    def train() -> None:
        optimizer.zero_grad()  # before the forward, as a training loop that saves memory does
        with autocast():
            logits = forward(*inputs).float()
            loss = F.cross_entropy(logits, target % logits.shape[1]) + 0.01 * timm_moe_dg.auxiliary_loss(model)
        loss.backward()
        optimizer.step()

    return train if mode == "train" else infer


def build_step(setting: Row, label: str, args: argparse.Namespace) -> Step:
    """Builds one of a setting's models, and returns its step."""
    return model_step(mixture_and_baselines(setting["model"], setting["options"])[label](), setting, args)


def measure(setting: Row, args: argparse.Namespace) -> list[Row]:
    """One row per model: the mixture, its dense twin and the FLOP-equivalent."""
    torch.compiler.reset()  # after the programs of some settings, torch would run further models in eager mode
    makers = mixture_and_baselines(setting["model"], setting["options"])
    models = {label: make().to(args.device) for label, make in makers.items()}
    macs, timed, memory = {}, {}, dict.fromkeys(models)
    for label, model in models.items():
        macs[label] = count_macs(model, random_inputs(model, 1, args.device))
        timed[label] = partial(seconds_of, model_step(model, setting, args), args.device)
    seconds = interleaved(timed, args.rounds, args.warmup)
    if args.memory:
        builds = {label: partial(build_step, setting, label, args) for label in models}
        memory = {label: peak_memory(build, args.device, args.cpu_threads) for label, build in builds.items()}
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
            "peak_mib": memory[label],
        }
        for label, model in models.items()
    ]


def cells(row: Row, mixture: Row) -> list[str]:
    """One line of the table; `mixture` is the row of the mixture model itself."""
    is_mixture = row is mixture
    options = "".join(f" {key}={value}" for key, value in row["options"].items()) if is_mixture else ""
    low, middle, high = row["ratio"]
    ratio = "" if is_mixture else f"{middle:.3f} ({low:.3f}-{high:.3f})"
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    if memory and not is_mixture:
        memory += f" ({mixture['peak_mib'] / row['peak_mib']:.2f})"
    label = f"{row['model']}{options}" if is_mixture else f"&nbsp;&nbsp;{row['against']}"
    numbers = [f"{row['parameters'] / 1e6:.2f}", f"{row['gmacs']:.3f}", f"{row['seconds'] * 1e3:.2f}"]
    return [label, *(str(row[name]) for name in CONDITIONS), *numbers, ratio, memory]


@tool
def main(argv: Sequence[str]) -> None:
    """Measures models, prints a table in Markdown, and writes its figures."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(args.cpu_threads)
    check_models(args)
    keep_freed_memory()  # otherwise page faults decide, above all those of the dense models
    heading = ["model", *CONDITIONS[:-1], "batch", *HEADINGS]
    software = ", ".join(map(" ".join, VERSIONS.items()))
    print(f"{software}, {device_name(args.device)}, {args.cpu_threads} threads, {args.rounds} rounds\n")
    print(f"| {' | '.join(heading)} |\n|{' --- |' * len(heading)}")
    rows: list[Row] = []
    for setting in settings_of(args):
        measured = measure(setting, args)
        print("\n".join(f"| {' | '.join(cells(row, measured[0]))} |" for row in measured), flush=True)
        rows += measured
    if args.output:
        options = {key: str(value) for key, value in vars(args).items()}
        machine = {"versions": VERSIONS, "name": device_name(args.device), **options}
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
