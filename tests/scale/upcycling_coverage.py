"""Which of timm's networks can be upcycled, family by family, and whether the mixtures compute what the networks do.

    python -m tests.scale.upcycling_coverage --output output/upcycling                # everything, resumed
    python -m tests.scale.upcycling_coverage --output output/upcycling --only convnext  # one family
    python -m tests.scale.upcycling_coverage --output output/upcycling --docs docs/guides/backbones.md

Every architecture is built without storage, and its feed-forwards are counted by form. The smallest of each family and
form is then built with random weights, perturbed so that nothing is zero, and upcycled: its logits are compared with
those of the dense network, it is saved and loaded again, and takes one training step. Each is a line of JSON.
"""

import argparse
import contextlib
import copy
import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import timm_moe_dg
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.layers.dense.feed_forwards import read_feed_forward
from timm_moe_dg.models.upcycling import find_feed_forwards, refused_feed_forwards

CLASSES, SIZES = 7, (64, 96, 128, 192, None)
BEGIN, END = "<!-- coverage: written by tests/scale/upcycling_coverage.py -->", "<!-- end of coverage -->"
Row = dict[str, Any]  # one line of JSON


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of what was found, read again when the tool goes on")
    add("--only", nargs="*", metavar="FAMILY", help="modules of timm, such as convnext (default: all)")
    add(
        "--max-params", type=float, default=120, metavar="M", help="largest network compared, in millions (%(default)s)"
    )
    add("--docs", type=Path, metavar="MD", help="page whose table is replaced by what was found")
    return parser


def form_of(mlp: nn.Module) -> str:
    """What kind of feed-forward it is, in words."""
    parts = read_feed_forward(mlp)
    normed = not isinstance(parts.norm, nn.Identity)
    words = [type(mlp).__name__, "1x1 convolutions" if parts.channels_first else "", "inner norm" if normed else ""]
    return ", ".join(filter(None, words))


def survey(name: str) -> Row:
    """What one architecture holds, built without storage."""
    with torch.device("meta"), without_draws():
        model: Any = timm.create_model(name)
    forms = Counter(form_of(mlp) for mlp, _ in find_feed_forwards(model).values())
    return {
        "name": name,
        "family": timm.models.model_entrypoint(name).__module__.rpartition(".")[2],
        "forms": forms,
        "millions": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "refused": [reason.partition(":")[0] for reason in refused_feed_forwards(model).values()] if not forms else [],
    }


@contextlib.contextmanager
def without_draws() -> Iterator[None]:
    """Lets weights be as they come: drawing those without storage takes most of the time."""
    names = [f"torch.nn.init.{name}_" for name in ("kaiming_uniform", "uniform", "normal", "trunc_normal")]
    with contextlib.ExitStack() as patches:
        for name in (*names, "timm.layers.weight_init._trunc_normal_"):
            patches.enter_context(mock.patch(name, lambda tensor, *_, **__: tensor))
        yield


def representatives(rows: Iterable[Row]) -> list[str]:
    """The smallest architecture of each family and form."""
    smallest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["millions"]):
        for form in row["forms"]:
            smallest.setdefault((row["family"], form), row)
    return sorted({row["name"] for row in smallest.values()})


def compare(name: str, cut: bool) -> Row:
    """Upcycles one architecture and finds out whether it still computes the same, and whatever else is claimed."""
    torch.manual_seed(0)
    options, dense, images = small_network(name, {"depth": 2} if cut else {})
    perturb(dense)
    with torch.no_grad():
        expected = logits(dense, images)
    weights = {"state_dict": copy.deepcopy(dense.state_dict()), "num_classes": CLASSES}
    grown = without_gradient(dense, images)  # changes running statistics
    mixture: Any = timm.create_model(
        "gmoe", True, backbone=name, num_classes=CLASSES, num_experts=4, pretrained_cfg_overlay=weights, **options
    ).eval()
    with torch.no_grad():
        difference = (logits(mixture, images) - expected).abs().max().item()
    perturb(mixture)
    return {
        "name": name,
        "options": options,
        "size": images.shape[-1],
        "spread": expected.std().item(),
        "difference": difference,
        "reload": reloads(mixture, images),
        "without_gradient": sorted(without_gradient(mixture, images) - grown),
    }


def small_network(name: str, fewer: Row) -> tuple[Row, nn.Module, Tensor]:
    """A network for the smallest images that it answers to, how it was made, and two such images."""
    problems = []
    for size in SIZES:
        choices: tuple[Row, ...] = ({"img_size": size, **fewer}, fewer) if size else (fewer,)
        for options in choices:
            try:
                model: Any = timm.create_model(name, num_classes=CLASSES, **options).eval()
                own = model.pretrained_cfg["input_size"]
                images = torch.randn(2, own[0], *((size, size) if size else own[1:]))
                with torch.no_grad():
                    if torch.isfinite(logits(model, images)).all():
                        return options, model, images
            except Exception as error:  # whatever a network says to images of a size that it was not made for
                problems.append(error)
    raise problems[-1]


def logits(model: nn.Module, images: Tensor) -> Tensor:
    """The answer; networks that distill give two."""
    answer = model(images)
    return answer[0] if isinstance(answer, tuple) else answer


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Moves every weight away from its initial value, so that none is 0 and no two experts are equal."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.train().eval()  # some keep what they have computed from their weights until they are trained again


def without_gradient(model: nn.Module, images: Tensor) -> set[str]:
    """Names of the parameters that one backward pass does not reach."""
    model.train().zero_grad()
    answer = model(images)
    answers = answer if isinstance(answer, tuple) else (answer,)
    loss = sum(one.square().mean() for one in answers) + 0.01 * timm_moe_dg.auxiliary_loss(model)
    loss.backward()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    model.eval().zero_grad()
    return names


def reloads(model: nn.Module, images: Tensor) -> str:
    """'bitwise' if a saved network answers as it did; what went wrong otherwise."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            save_for_hf(model, folder, safe_serialization=True)
        except RuntimeError as error:
            return f"cannot be saved: {str(error).strip()[:60]}"
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return "bitwise" if torch.equal(logits(again, images), logits(model, images)) else "differs"


def kept(path: Path, names: Sequence[str], work: Callable[[str], Row]) -> list[Row]:
    """Does what is left to do, a line of JSON for each name, and returns the lines of these names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}
    for name in names:
        if name not in done:
            try:
                done[name] = work(name)
            except Exception as error:  # one network's trouble is a line of the table
                done[name] = {"name": name, "error": f"{type(error).__name__}: {error}"[:300]}
            with path.open("a") as lines:
                lines.write(f"{json.dumps(done[name])}\n")
            sys.stdout.write(f"{json.dumps(done[name])}\n")
            sys.stdout.flush()
            gc.collect()
    return [done[name] for name in names]


def short_table(surveyed: Sequence[Row]) -> str:
    """Returns the page's list: modules of timm, with the numbers of architectures where some are not eligible."""
    families: dict[str, list[bool]] = {}
    for row in surveyed:
        families.setdefault(row.get("family", "?"), []).append(bool(row.get("forms")))
    eligible = sum(map(sum, families.values()))
    whole = [name for name, each in sorted(families.items()) if all(each)]
    part = [
        f"{name} ({sum(each)} of {len(each)})" for name, each in sorted(families.items()) if 0 < sum(each) < len(each)
    ]
    return "\n".join(
        [
            f"Of timm {timm.__version__}, {eligible} of {len(surveyed)} architectures can be upcycled:",
            "",
            "| architectures | modules of timm |",
            "|---|---|",
            f"| all | {', '.join(whole)} |",
            f"| some | {', '.join(part)} |",
        ]
    )


def report(args: argparse.Namespace) -> None:
    """Surveys, compares, and writes the page."""
    names = [name for name in timm.list_models() if timm.models.model_entrypoint(name).__module__.startswith("timm.")]
    names = [
        name
        for name in names
        if not args.only or timm.models.model_entrypoint(name).__module__.split(".")[-1] in args.only
    ]
    surveyed = kept(args.output / "survey.jsonl", names, survey)
    chosen = representatives(row for row in surveyed if not row["name"].startswith("test_") and row.get("forms"))
    large = {row["name"] for row in surveyed if row.get("millions", 0) > args.max_params}
    kept(args.output / "compared.jsonl", chosen, lambda name: compare(name, name in large))
    if args.docs:
        before, _, rest = args.docs.read_text().partition(BEGIN)
        args.docs.write_text(f"{before}{BEGIN}\n{short_table(surveyed)}\n{END}{rest.partition(END)[2]}")


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    report(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
