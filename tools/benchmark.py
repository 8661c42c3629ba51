"""Time and memory of mixture models against dense ones, interleaved in one process so that a noisy machine cancels.

    python tools/benchmark.py                                                  # gmoe_small_patch16, batch 8, inference
    python tools/benchmark.py --model sfmoe_small moge_tiny --batch-size 1 8 --mode inference train
    python tools/benchmark.py --device cuda --dtype bfloat16 --batch-size 160 --compile --output gpu.json

Every model is measured against two others on the same input. Its dense twin is timm's model that its weights come
from, what a user would run instead. The FLOP-equivalent dense model is the twin with a feed-forward K times as wide in
the mixture blocks (1 + K for MoGE): it computes as much without routing, so the ratio to it is pure overhead. Rounds
go A B C A B C; each ratio is taken within a round, and the median over rounds is shown with its quartiles.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import timm_moe_dg
from timm_moe_dg.layers import GeoMoeMlp, LocationIdEmbedding, RoutedMlp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["gmoe_small_patch16"], help="registered models of timm_moe_dg")
    parser.add_argument("--mode", nargs="+", choices=["inference", "train"], default=["inference"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[8], help="images per forward")
    parser.add_argument("--img-size", type=int, help="pixels; default: the model's own")
    parser.add_argument("--num-experts", type=int, help="experts per layer; default: the model's own")
    parser.add_argument("--top-k", type=int, help="experts per token or image; default: the model's own")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds after --warmup")
    parser.add_argument("--warmup", type=int, default=3, help="rounds that are not timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--device", default="cpu", help="torch device, such as cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="autocast type; float32: no autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile all models")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    return parser


def dense_twin(model: nn.Module, widen: int = 1) -> nn.Module:
    """The dense model that `model` is upcycled from, its mixture blocks' feed-forward `widen` times as wide."""
    name = model.pretrained_cfg["hf_hub_id"].split("/")[1].split(".")[0]
    mixtures = {index for index, block in enumerate(model.blocks) if isinstance(block.mlp, RoutedMlp)}

    def build_block(depth: int, mlp_ratio: float, **kwargs: Any) -> Block:
        return Block(depth=depth, mlp_ratio=mlp_ratio * (widen if depth in mixtures else 1), **kwargs)

    return timm.create_model(
        name, num_classes=model.num_classes, img_size=model.patch_embed.img_size, block_fn=build_block
    )


def active_width(model: nn.Module) -> int:
    """How many feed-forwards a token of `model` passes in a mixture block."""
    layer = next(module for module in model.modules() if isinstance(module, RoutedMlp))
    return layer.router.top_k + isinstance(layer, GeoMoeMlp)


def make_inputs(model: nn.Module, batch_size: int, device: torch.device) -> tuple[Tensor, ...]:
    """Random images, and random metadata for a model that takes it."""
    images = torch.randn(batch_size, 3, *model.patch_embed.img_size, device=device)
    encoder = getattr(getattr(model, "metadata_encoder", None), "encoder", None)
    if encoder is None:
        return (images,)
    if isinstance(encoder, LocationIdEmbedding):
        return images, torch.randint(encoder.num_locations, (batch_size,), device=device)
    return images, (torch.rand(batch_size, 2, device=device) - 0.5) * torch.tensor([360.0, 180.0], device=device)


def make_step(model: nn.Module, inputs: tuple[Tensor, ...], args: argparse.Namespace, mode: str) -> Callable[[], None]:
    """What is timed: a forward in inference mode, or forward, auxiliary loss, backward and Adam."""
    model = model.to(args.device).train(mode == "train")
    forward = torch.compile(model) if args.compile else model
    device_type = torch.device(args.device).type
    dtype, enabled = DTYPES[args.dtype], args.dtype != "float32"
    target = torch.arange(len(inputs[0]), device=args.device) % model.num_classes
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5) if mode == "train" else None

    def infer() -> None:
        with torch.inference_mode(), torch.autocast(device_type, dtype, enabled=enabled):
            forward(*inputs)

    def train() -> None:
        with torch.autocast(device_type, dtype, enabled=enabled):
            loss = F.cross_entropy(forward(*inputs).float(), target) + 0.01 * timm_moe_dg.auxiliary_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return train if mode == "train" else infer


def timed(step: Callable[[], None], device: str) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    step()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def count_macs(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Multiply-accumulates of one image in matrix products and convolutions (torch's counter)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(*(tensor[:1] for tensor in inputs))
    return counter.get_total_flops() / 2


def measure(name: str, mode: str, batch_size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model: itself, its dense twin, and the FLOP-equivalent."""
    options = {key: getattr(args, key) for key in ("img_size", "num_experts", "top_k") if getattr(args, key)}
    model = timm.create_model(name, **options)
    inputs = make_inputs(model, batch_size, torch.device(args.device))
    models = {name: model, "dense twin": dense_twin(model), "FLOP-equivalent": dense_twin(model, active_width(model))}
    given = {label: inputs if label == name else inputs[:1] for label in models}
    macs = {label: count_macs(one.to(args.device), given[label]) for label, one in models.items()}
    steps = {label: make_step(one, given[label], args, mode) for label, one in models.items()}
    rounds = []
    for index in range(args.warmup + args.rounds):
        times = {label: timed(step, args.device) for label, step in steps.items()}
        if index >= args.warmup:
            rounds.append(times)
    return [
        {
            "model": name,
            "against": label,
            "mode": mode,
            "batch_size": batch_size,
            "parameters": sum(parameter.numel() for parameter in models[label].parameters()),
            "gmacs": macs[label] / 1e9,
            "seconds": statistics.median(times[label] for times in rounds),
            "ratio": statistics.quantiles([times[name] / times[label] for times in rounds], n=4),
        }
        for label in models
    ]


def main(args: argparse.Namespace) -> None:
    """Measures, prints a table, writes JSON."""
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {args.threads} threads, {args.dtype}, {args.rounds} rounds")
    print(
        f"{'model':34} {'mode':10} {'batch':>5} {'M param':>8} {'GMACs':>6} {'ms':>9} {'ratio to it (quartiles)':>26}"
    )
    rows = []
    for name in args.model:
        for mode in args.mode:
            for batch_size in args.batch_size:
                for row in measure(name, mode, batch_size, args):
                    low, middle, high = row["ratio"]
                    label = name if row["against"] == name else f"  {row['against']}"
                    ratio = "" if row["against"] == name else f"{middle:.3f} ({low:.3f}-{high:.3f})"
                    print(
                        f"{label:34} {mode:10} {batch_size:5} {row['parameters'] / 1e6:8.2f} {row['gmacs']:6.2f} "
                        f"{row['seconds'] * 1e3:9.1f} {ratio:>26}",
                        flush=True,
                    )
                    rows.append(row)
    if args.output:
        machine = {"torch": torch.__version__, "processor": platform.machine(), **vars(args), "output": None}
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main(build_parser().parse_args())
