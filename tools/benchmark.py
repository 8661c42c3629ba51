"""Time and memory of mixture models against dense ones, interleaved in one process so that a noisy machine cancels.

    python tools/benchmark.py                                                  # gmoe_small_patch16, batch 8, inference
    python tools/benchmark.py --model sfmoe_small moge_tiny --batch-size 1 8 --mode inference train --memory
    python tools/benchmark.py --layer --mode inference train                   # the feed-forward alone
    python tools/benchmark.py --num-experts 2 6 16 64 --batch-size 1 8 --plot cost.png
    python tools/benchmark.py --model gmoe --backbone eva02_tiny_patch14_224 --layer           # any network of timm's

Everything that decides how experts are computed on a GPU, as a table to send in:

    python tools/benchmark.py --device cuda --batch-size 128 --mode inference train --dtype float32 bfloat16 \
        --program eager compiled --dispatch sorted grouped --table gpu.md

Every model is measured against two others on the same input. Its dense twin is timm's model that its weights come
from, what a user would run instead. The FLOP-equivalent dense model is the twin with a feed-forward K times as wide in
the mixture blocks (1 + K for MoGE): it computes as much without routing, so the ratio to it is pure overhead. Rounds
go A B C A B C; each ratio is taken within a round, and the median over rounds is shown with its quartiles. On Linux
freed memory is kept, so that no model waits for pages that another did not have to wait for; with --glibc-defaults they
wait as in any other process.
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
from torch import Tensor, nn
from torch.nn import functional as F

import timm_moe_dg
from timm_moe_dg.analysis.cost_plots import plot_cost
from timm_moe_dg.cli.arguments import (
    int_from_2,
    non_negative_int,
    output_file,
    parse_words,
    positive_int,
    usable_device,
)
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import dispatch_info, set_dispatch
from timm_moe_dg.layers.experts import DISPATCHES
from timm_moe_dg.measure.cost import count_macs
from timm_moe_dg.measure.memory import keep_freed_memory, peak_memory
from timm_moe_dg.measure.timing import device_name, interleaved, quartiles, ratios, seconds_of
from timm_moe_dg.networks.build import check_name
from timm_moe_dg.networks.dense_twins import layer_and_rivals, mixture_and_rivals, mixture_layer, random_inputs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model, "compiled": torch.compile}
# What a table says of a setting, beside its model and options
CONDITIONS = ("mode", "dtype", "program", "dispatch", "batch_size")
HEADINGS = ("M param", "GMACs", "ms", "ratio to it (quartiles)", "MiB (ratio)")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", nargs="+", default=["gmoe_small_patch16"], help="mixture models of timm_moe_dg (%(default)s)")
    add("--backbone", help="network of timm's that --model gmoe is made of (default: its own)")
    add("--against", help="any timm model to compare with, beside the dense twin and the FLOP-equivalent")
    add("--layer", action="store_true", help="the mixture layer alone instead of the model")
    add("--mode", nargs="+", choices=["inference", "train"], default=["inference"], help="what is timed (%(default)s)")
    add("--batch-size", nargs="+", type=positive_int, default=[8], help="images per forward (%(default)s)")
    add("--img-size", nargs="+", type=positive_int, default=[None], help="pixels (default: the model's own)")
    add("--num-experts", nargs="+", type=positive_int, default=[None], help="experts per layer (default: its own)")
    add("--top-k", nargs="+", type=positive_int, default=[None], help="experts per token or image (default: its own)")
    dtypes = "autocast types; float32 is none (%(default)s)"
    add("--dtype", nargs="+", choices=list(DTYPES), default=["float32"], help=dtypes)
    add("--program", nargs="+", choices=list(PROGRAMS), default=["eager"], help="as it is, or torch.compile's")
    how = "how the experts are computed, see timm_moe_dg.layers.set_dispatch (%(default)s)"
    add("--dispatch", nargs="+", choices=DISPATCHES, default=["auto"], help=how)
    add("--rounds", type=int_from_2, default=20, help="timed rounds, 2 or more (%(default)s)")
    add("--warmup", type=non_negative_int, default=3, help="rounds before them (%(default)s)")
    peak = "peak memory too, each model in a process of its own (on a CPU: Linux only)"
    add("--memory", action="store_true", help=peak)
    add("--glibc-defaults", action="store_true", help="let the C library hand freed memory back, and page faults count")
    add("--threads", type=positive_int, default=torch.get_num_threads(), help="CPU threads (%(default)s)")
    add("--device", type=usable_device, default="cpu", help="torch device, such as cuda (%(default)s)")
    add("--output", type=output_file, metavar="JSON", help="file for the figures")
    add("--table", type=output_file, metavar="MD", help="file for the table, in Markdown")
    add("--plot", type=output_file, metavar="PNG", help="picture of the cost against what was varied")
    return parser


def check_models(args: argparse.Namespace) -> None:
    """Finds out before anything is measured whether every model can be made.

    Raises:
        ArgumentError: There is no such model, it has no mixture layers, or an option does not fit it.
    """
    for name in (*args.model, *([args.against] if args.against else [])):
        check_name(name)
    if args.backbone and args.model != ["gmoe"]:
        raise ArgumentError.of("backbone", args.backbone, "goes with --model gmoe alone")
    for name in args.model:
        mixture_layer(timm.create_model(name, device="meta"))
    for setting in settings_of(args):
        timm.create_model(setting["model"], device="meta", **setting["options"])


def settings_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination of the command line's lists."""
    options = {"img_size": args.img_size, "num_experts": args.num_experts, "top_k": args.top_k}
    conditions = {name: getattr(args, name) for name in CONDITIONS}
    found = []
    for model, *values in itertools.product(args.model, *options.values(), *conditions.values()):
        given = zip(("backbone", *options), (args.backbone, *values), strict=False)
        rest = dict(zip(conditions, values[len(options) :], strict=True))
        found.append({"model": model, "options": {key: value for key, value in given if value}, **rest})
    return found


def make_all(setting: dict[str, Any], args: argparse.Namespace) -> dict[str, Callable[[], nn.Module]]:
    """How to make a setting's model and what it is compared with, by label."""
    if args.layer:
        return layer_and_rivals(setting["model"], setting["options"])
    return mixture_and_rivals(setting["model"], setting["options"], args.against)


def inputs_of(model: nn.Module, setting: dict[str, Any], args: argparse.Namespace) -> tuple[Tensor, ...]:
    """What a model of a setting is called with."""
    return random_inputs(model, setting["model"], setting["options"], setting["batch_size"], args.device)


def make_step(
    model: nn.Module, inputs: tuple[Tensor, ...], setting: dict[str, Any], args: argparse.Namespace
) -> Callable[[], None]:
    """What is timed: a forward in inference mode, or forward, auxiliary loss, backward and (for a model) fused Adam."""
    mode, dtype = setting["mode"], setting["dtype"]
    model = model.to(args.device).train(mode == "train")
    set_dispatch(model, setting["dispatch"])
    forward = PROGRAMS[setting["program"]](model)
    autocast: dict[str, Any] = {"device_type": torch.device(args.device).type, "dtype": DTYPES[dtype]}
    autocast["enabled"] = dtype != "float32"
    target = torch.arange(len(inputs[0]), device=args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)

    def infer() -> None:
        with torch.inference_mode(), torch.autocast(**autocast):
            forward(*inputs)

    def train() -> None:
        optimizer.zero_grad()  # before the forward, as a training loop that saves memory does
        inputs[0].grad = None  # nor would a layer's input add to the last step's
        with torch.autocast(**autocast):
            output = forward(*inputs).float()
            task = output.square().mean() if args.layer else F.cross_entropy(output, target % output.shape[1])
            loss = task + 0.01 * timm_moe_dg.auxiliary_loss(model)
        loss.backward()
        if not args.layer:
            optimizer.step()

    return train if mode == "train" else infer


def build_step(setting: dict[str, Any], label: str, args: argparse.Namespace) -> Callable[[], None]:
    """One model of a setting and what is timed of it."""
    model = make_all(setting, args)[label]()
    return make_step(model, inputs_of(model, setting, args), setting, args)


def measure(setting: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model: itself, its dense twin, the FLOP-equivalent, and what `--against` names."""
    name, on = setting["model"], {"device": args.device, "threads": args.threads}
    models = {label: make().to(args.device) for label, make in make_all(setting, args).items()}
    inputs = {label: inputs_of(model, setting, args) for label, model in models.items()}
    macs = {label: count_macs(model, [one[:1].detach() for one in inputs[label]]) for label, model in models.items()}
    steps = {label: make_step(model, inputs[label], setting, args) for label, model in models.items()}
    timed = {label: partial(seconds_of, step, args.device) for label, step in steps.items()}
    seconds = interleaved(timed, args.rounds, args.warmup)
    return [
        {
            **setting,
            "taken": taken(model) if setting["program"] == "eager" else [],
            "against": label,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "gmacs": macs[label] / 1e9,
            "seconds": statistics.median(seconds[label]),
            "ratio": quartiles(ratios(seconds[name], seconds[label])),
            "peak_mib": peak_memory(build_step, setting, label, args, **on) if args.memory else None,
        }
        for label, model in models.items()
    ]


def taken(model: nn.Module) -> list[str]:
    """The dispatches that its mixture layers took; none in a dense one."""
    return sorted({path for path in dispatch_info(model).values() if path})


def cells(row: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """One line of the table; `own` is the row of the mixture model itself."""
    itself = row is own
    options = "".join(f" {key}={value}" for key, value in row["options"].items()) if itself else ""
    low, middle, high = row["ratio"]
    ratio = "" if itself else f"{middle:.3f} ({low:.3f}-{high:.3f})"
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    if memory and not itself:
        memory += f" ({own['peak_mib'] / row['peak_mib']:.2f})"
    label = f"{row['model']}{options}" if itself else f"  {row['against']}"
    numbers = [f"{row['parameters'] / 1e6:.2f}", f"{row['gmacs']:.3f}", f"{row['seconds'] * 1e3:.2f}"]
    return [label, *(str(row[name]) for name in CONDITIONS), *numbers, ratio, memory]


def aligned(line: Sequence[str]) -> str:
    """A line of the printed table."""
    label, mode, dtype, program, dispatch, batch, parameters, macs, ms, ratio, memory = line
    conditions = f"{mode:9} {dtype:8} {program:8} {dispatch:8} {batch:>5}"
    return f"{label:40} {conditions} {parameters:>8} {macs:>7} {ms:>9} {ratio:>23} {memory:>13}".rstrip()


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; the first line is its heading."""
    head, *rest = ([cell.replace("  ", "&nbsp;&nbsp;") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rest)) + "\n"


def report(args: argparse.Namespace) -> None:
    """Measures, prints a table, writes it and a picture."""
    check_models(args)
    torch.set_num_threads(args.threads)
    if not args.glibc_defaults:  # with them rounds are a matter of luck, most of all those of the dense models
        keep_freed_memory()
    where = f"torch {torch.__version__}, {device_name(args.device)}, {args.threads} threads, {args.rounds} rounds"
    lines: list[list[str]] = [["model", *CONDITIONS[:-1], "batch", *HEADINGS]]
    print(f"{where}\n{aligned(lines[0])}")
    rows = []
    for setting in settings_of(args):
        new = measure(setting, args)
        lines += [cells(row, new[0]) for row in new]
        print("\n".join(map(aligned, lines[-len(new) :])), flush=True)
        rows += new
    if args.output:
        options = {key: str(value) for key, value in vars(args).items()}
        machine = {"torch": torch.__version__, "name": device_name(args.device), **options}
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    if args.table:
        args.table.write_text(f"{where}\n\n{markdown(lines)}")
    if args.plot:
        plot_cost(rows, args.plot)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    report(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
