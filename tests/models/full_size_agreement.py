"""How far the seven models at full size are from themselves once exported, by hand: minutes, not part of the suite.

    python -m tests.models.full_size_agreement                  # all models
    python -m tests.models.full_size_agreement moge_tiny --compile

Each row is the largest absolute difference of logits to the eager model, over batches of 2 (what the programs are
recorded with), 1 and 5 images, with metadata where the model takes them, and with every expert and code different.
"""

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.models.cases import BY_NAME, Case, mixture_layers, randomize
from timm_moe_dg.export.programs import Program, load_onnx, record_program, save_onnx


def prepared(case: Case) -> nn.Module:
    """The registered model with weights away from their initial values."""
    torch.manual_seed(0)
    model = randomize(case.build(), std=0.02).eval()
    for layer in mixture_layers(model).values():
        for name, parameter in layer.get_submodule("router").named_parameters():
            if name in ("codes", "gate.weight"):
                nn.init.normal_(parameter)
    return model


@torch.no_grad()
def largest_difference(model: nn.Module, program: Program, inputs: tuple[Tensor, ...]) -> float:
    """Over batches of 2, 1 and 5."""
    batches = [tuple(one[:size] for one in inputs) for size in (2, 1, 5)]
    return max((program(*batch) - model(*batch)).abs().max().item() for batch in batches)


def row(case: Case, with_compile: bool) -> list[float]:
    """Differences of one model: torch.export, onnxruntime, TorchScript, trace, and torch.compile if asked for."""
    model = prepared(case)
    inputs = case.inputs(5, case.img_size)
    two = tuple(one[:2] for one in inputs)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        save_onnx(record_program(model, two), file)
        programs = [
            record_program(model, two).module(),
            load_onnx(file),
            torch.jit.script(model),
            torch.jit.trace(model, two),
        ]
        if with_compile:
            programs.append(torch.compile(model, fullgraph=True))
        return [largest_difference(model, one, inputs) for one in programs]


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description="Largest difference between eager and exported models at full size.")
    parser.add_argument("names", nargs="*", help="registered names; all when none is given")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, about two minutes per model")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    heads = ["model", "torch.export", "onnxruntime", "TorchScript", "trace"] + ["torch.compile"] * arguments.compile
    sys.stdout.write(f"| {' | '.join([*heads, 'seconds'])} |\n|{'---|' * (len(heads) + 1)}\n")
    for name in arguments.names or BY_NAME:
        start = time.perf_counter()
        cells = [f"{difference:.1e}" for difference in row(BY_NAME[name], arguments.compile)]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} | {time.perf_counter() - start:.0f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
