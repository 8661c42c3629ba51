"""Time and memory of mixture models against dense ones, interleaved in one process so that a noisy machine cancels.

    python tools/benchmark.py                                                  # gmoe_small_patch16, batch 8, inference
    python tools/benchmark.py --model sfmoe_small moge_tiny --batch-size 1 8 --mode inference train --memory
    python tools/benchmark.py --layer --mode inference train                   # the feed-forward alone
    python tools/benchmark.py --num-experts 2 6 16 64 --batch-size 1 8 --plot cost.png
    python tools/benchmark.py --model gmoe --backbone eva02_tiny_patch14_224 --layer           # any network of timm's
    python tools/benchmark.py --device cuda --dtype bfloat16 --batch-size 160 --compile --output gpu.json

Every model is measured against two others on the same input. Its dense twin is timm's model that its weights come
from, what a user would run instead. The FLOP-equivalent dense model is the twin with a feed-forward K times as wide in
the mixture blocks (1 + K for MoGE): it computes as much without routing, so the ratio to it is pure overhead. Rounds
go A B C A B C; each ratio is taken within a round, and the median over rounds is shown with its quartiles. On Linux
freed memory is kept, so that no model waits for pages that another did not have to wait for; with --glibc-defaults they
wait as in any other process.
"""

import argparse
import copy
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

import timm_moe_dg
from timm_moe_dg.analysis.plots import plot_cost
from timm_moe_dg.cli.arguments import (
    int_from_2,
    non_negative_int,
    output_file,
    parse_words,
    positive_int,
    threads,
    usable_device,
)
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import GeoMoeMlp, LocationIdEmbedding, RoutedMlp
from timm_moe_dg.layers.feed_forwards import DENSE_FORMS, read_feed_forward
from timm_moe_dg.measure.cost import count_macs
from timm_moe_dg.measure.memory import keep_freed_memory, peak_memory
from timm_moe_dg.measure.timing import interleaved, quartiles, ratios, seconds_of
from timm_moe_dg.networks.build import check_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Network: TypeAlias = Any  # a timm model or a feed-forward: to mypy each attribute of a module may be a tensor
TWIN, EQUIVALENT = "dense twin", "FLOP-equivalent"


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
    add("--rounds", type=int_from_2, default=20, help="timed rounds, 2 or more (%(default)s)")
    add("--warmup", type=non_negative_int, default=3, help="rounds before them (%(default)s)")
    add(
        "--memory",
        action="store_true",
        help="peak memory too, each model in a process of its own (on a CPU: Linux only)",
    )
    add("--glibc-defaults", action="store_true", help="let the C library hand freed memory back, and page faults count")
    add("--threads", type=threads, default=torch.get_num_threads(), help="CPU threads (%(default)s)")
    add("--device", type=usable_device, default="cpu", help="torch device, such as cuda (%(default)s)")
    add("--dtype", choices=list(DTYPES), default="float32", help="autocast type; float32 is none (%(default)s)")
    add("--compile", action="store_true", help="torch.compile everything")
    add("--output", type=output_file, metavar="JSON", help="file for the figures")
    add("--plot", type=output_file, metavar="PNG", help="picture of the cost against experts and batch size")
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
    for setting in model_options(args):
        timm.create_model(setting["model"], device="meta", **setting["options"])


def mixture_layer(model: Network) -> RoutedMlp:
    """The first mixture layer of a model.

    Raises:
        ArgumentError: There is none.
    """
    for module in model.modules():
        if isinstance(module, RoutedMlp):
            return module
    name = model.pretrained_cfg["architecture"]
    raise ArgumentError.of("model", name, "has no mixture layers; compare with it by --against")


def active_width(layer: RoutedMlp) -> int:
    """How many feed-forwards a token passes in a mixture layer."""
    router: Network = layer.router
    return router.top_k + (isinstance(layer, GeoMoeMlp) and layer.shared is not None)


def builders(name: str, options: dict[str, Any], args: argparse.Namespace) -> dict[str, Callable[[], nn.Module]]:
    """How to make the model and what it is compared with, by label; with `--layer` one feed-forward of each."""
    plan: Network = timm.create_model(name, device="meta", **options)
    layer = mixture_layer(plan)
    width = active_width(layer)
    if args.layer:
        if hasattr(plan, "mixture_args"):
            return layer_builders(name, plan, options)
        _, hidden, features = layer.fc1.weight.shape
        # Without the experts' dropout: the dense ones have none, and it is no part of routing
        makers: dict[str, Callable[[], nn.Module]] = {
            name: lambda: mixture_layer(timm.create_model(name, **options, expert_drop=0.0))
        }
        return {**makers, TWIN: lambda: Mlp(features, hidden), EQUIVALENT: lambda: Mlp(features, width * hidden)}
    makers = {name: lambda: timm.create_model(name, **options)}
    makers |= {TWIN: lambda: dense_twin(plan), EQUIVALENT: lambda: dense_twin(plan, width)}
    if args.against:
        makers[args.against] = lambda: timm.create_model(args.against, num_classes=plan.num_classes)
    return makers


def layer_builders(name: str, plan: Network, options: dict[str, Any]) -> dict[str, Callable[[], nn.Module]]:
    """One feed-forward of a mixture on a backbone and of what it is compared with."""
    place = next(name for name, module in plan.named_modules() if isinstance(module, RoutedMlp))
    width = active_width(mixture_layer(plan))
    return {
        name: lambda: mixture_layer(timm.create_model(name, **options, expert_drop=0.0)),
        TWIN: lambda: dense_twin(plan).get_submodule(place),
        EQUIVALENT: lambda: dense_twin(plan, width).get_submodule(place),
    }


def widened(mlp: nn.Module, factor: int) -> nn.Module:
    """A feed-forward with `factor` times as many hidden features, drawn anew; its inner normalization is left out."""
    parts, wide = read_feed_forward(mlp), copy.deepcopy(mlp)
    for name, layer in mlp.named_children():
        axes = (factor, 1) if layer in parts.first else (1, factor)
        if layer in (*parts.first, parts.second):
            rows, columns = (size * by for size, by in zip(layer.get_parameter("weight").shape, axes, strict=False))
            make: Any = functools.partial(nn.Conv2d, kernel_size=1) if parts.channels_first else nn.Linear
            setattr(wide, name, make(columns, rows, bias=layer.bias is not None))
        elif layer is parts.norm and factor > 1:
            setattr(wide, name, nn.Identity())
    return wide


def dense_backbone(model: Network, widen: int) -> nn.Module:
    """The network that a mixture was made of, feed-forwards widened where it has mixtures."""
    own = {"num_classes": model.num_classes} | (
        {"img_size": model._model_args["img_size"]} if "img_size" in model._model_args else {}
    )
    dense = timm.create_model(model.mixture_args["backbone"], **own)
    for name, module in model.named_modules():
        if isinstance(module, RoutedMlp):
            dense.set_submodule(name, widened(dense.get_submodule(name), widen))
    return dense


def dense_twin(model: Network, widen: int = 1) -> nn.Module:
    """The dense model that `model` is upcycled from, its mixture blocks' feed-forward `widen` times as wide."""
    if hasattr(model, "mixture_args"):
        return dense_backbone(model, widen)
    name = model.pretrained_cfg["hf_hub_id"].split("/")[1].split(".")[0]
    mixtures = {index for index, block in enumerate(model.blocks) if isinstance(block.mlp, RoutedMlp)}

    def build_block(depth: int, mlp_ratio: float, **kwargs: Any) -> Block:
        return Block(depth=depth, mlp_ratio=mlp_ratio * (widen if depth in mixtures else 1), **kwargs)

    size = model.patch_embed.img_size
    return timm.create_model(name, num_classes=model.num_classes, img_size=size, block_fn=build_block)


def num_tokens(name: str, options: dict[str, Any]) -> int:
    """Tokens per image."""
    plan: Network = timm.create_model(name, device="meta", **options)
    if not hasattr(plan, "patch_embed") or not hasattr(plan.patch_embed, "num_patches"):
        return 14**2  # of the stage with most blocks, at 224 pixels
    return plan.patch_embed.num_patches + getattr(plan, "num_prefix_tokens", 0)


def layer_shape(layer: Network, batch_size: int, tokens: int) -> tuple[int, ...]:
    """What a feed-forward takes."""
    routed = isinstance(layer, RoutedMlp)
    features = layer.fc1.weight.shape[-1] if routed else read_feed_forward(layer).weights()[0].shape[1]
    first = getattr(layer, "channels_first", False) if routed else read_feed_forward(layer).channels_first
    return (batch_size, features, 1, tokens) if first else (batch_size, tokens, features)


def make_inputs(model: Network, tokens: int, batch_size: int, device: str) -> tuple[Tensor, ...]:
    """Random input of one model: images, and metadata where it takes any; tokens for a feed-forward."""
    if isinstance(model, RoutedMlp) or type(model) in DENSE_FORMS:
        # The gradient of the input too: a feed-forward is not the first layer
        x = torch.randn(layer_shape(model, batch_size, tokens), device=device, requires_grad=True)
        if not isinstance(model, GeoMoeMlp):
            return (x,)
        present = torch.ones(batch_size, dtype=torch.bool, device=device)
        return x, torch.randn(batch_size, model.router.codes.shape[1], device=device), present
    own = getattr(getattr(model, "patch_embed", None), "img_size", None)  # networks of one size; the others take any
    size = own or resolve_model_data_config(model)["input_size"][1:]
    images = torch.randn(batch_size, 3, *size, device=device)
    encoder = getattr(getattr(model, "metadata_encoder", None), "encoder", None)
    if encoder is None:
        return (images,)
    if isinstance(encoder, LocationIdEmbedding):
        return images, torch.randint(encoder.num_locations, (batch_size,), device=device)
    return images, (torch.rand(batch_size, 2, device=device) - 0.5) * torch.tensor([360.0, 180.0], device=device)


def make_step(model: nn.Module, inputs: tuple[Tensor, ...], mode: str, args: argparse.Namespace) -> Callable[[], None]:
    """What is timed: a forward in inference mode, or forward, auxiliary loss, backward and (for a model) fused Adam."""
    model = model.to(args.device).train(mode == "train")
    forward = torch.compile(model) if args.compile else model
    autocast: dict[str, Any] = {"device_type": torch.device(args.device).type, "dtype": DTYPES[args.dtype]}
    autocast["enabled"] = args.dtype != "float32"
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
    model = builders(setting["model"], setting["options"], args)[label]()
    return make_step(model, setting_inputs(model, setting, args), setting["mode"], args)


def setting_inputs(model: nn.Module, setting: dict[str, Any], args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Inputs of one model in one setting."""
    tokens = num_tokens(setting["model"], setting["options"])
    return make_inputs(model, tokens, setting["batch_size"], args.device)


def measure(setting: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model: itself, its dense twin, the FLOP-equivalent, and what `--against` names."""
    name, on = setting["model"], {"device": args.device, "threads": args.threads}
    models = {label: make().to(args.device) for label, make in builders(name, setting["options"], args).items()}
    inputs = {label: setting_inputs(model, setting, args) for label, model in models.items()}
    macs = {label: count_macs(model, [one[:1].detach() for one in inputs[label]]) for label, model in models.items()}
    steps = {label: make_step(model, inputs[label], setting["mode"], args) for label, model in models.items()}
    timed = {label: partial(seconds_of, step, args.device) for label, step in steps.items()}
    seconds = interleaved(timed, args.rounds, args.warmup)
    return [
        {
            **setting,
            "against": label,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "gmacs": macs[label] / 1e9,
            "seconds": statistics.median(seconds[label]),
            "ratio": quartiles(ratios(seconds[name], seconds[label])),
            "peak_mib": peak_memory(build_step, setting, label, args, **on) if args.memory else None,
        }
        for label, model in models.items()
    ]


def model_options(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination of the command line's lists."""
    grid = itertools.product(args.model, args.mode, args.img_size, args.num_experts, args.top_k, args.batch_size)
    return [
        {
            "model": model,
            "mode": mode,
            "batch_size": batch_size,
            "options": {
                key: value
                for key, value in (
                    ("backbone", args.backbone),
                    ("img_size", size),
                    ("num_experts", experts),
                    ("top_k", k),
                )
                if value
            },
        }
        for model, mode, size, experts, k, batch_size in grid
    ]


def table_line(row: dict[str, Any], own: dict[str, Any]) -> str:
    """One line of the printed table; `own` is the row of the mixture model itself."""
    itself = row is own
    options = " ".join(f"{key}={value}" for key, value in row["options"].items()) if itself else ""
    low, middle, high = row["ratio"]
    ratio = "" if itself else f"{middle:.3f} ({low:.3f}-{high:.3f})"
    memory = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    if memory and not itself:
        memory += f" ({own['peak_mib'] / row['peak_mib']:.2f})"
    label = f"{row['model']} {options}" if itself else f"  {row['against']}"
    numbers = f"{row['parameters'] / 1e6:8.2f} {row['gmacs']:7.3f} {row['seconds'] * 1e3:9.2f}"
    return f"{label:40} {row['mode']:9} {row['batch_size']:5} {numbers} {ratio:>23} {memory:>13}"


def report(args: argparse.Namespace) -> None:
    """Measures, prints a table, writes JSON and a picture."""
    check_models(args)
    torch.set_num_threads(args.threads)
    if not args.glibc_defaults:  # with them rounds are a matter of luck, most of all those of the dense models
        keep_freed_memory()
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.dtype}, {args.rounds} rounds")
    heading = f"{'M param':>8} {'GMACs':>7} {'ms':>9} {'ratio to it (quartiles)':>23} {'MiB (ratio)':>13}"
    print(f"{'model':40} {'mode':9} {'batch':>5} {heading}")
    rows = []
    for setting in model_options(args):
        new = measure(setting, args)
        print("\n".join(table_line(row, new[0]) for row in new), flush=True)
        rows += new
    if args.output:
        machine = {"torch": torch.__version__, **{key: str(value) for key, value in vars(args).items()}}
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    if args.plot:
        plot_cost(rows, args.plot)


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    report(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
