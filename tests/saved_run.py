"""Run folders with a small network in them, made without training, and what two runs have to have in common."""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from tests.models.cases import randomize
from timm_moe_dg.networks.build import build_network, data_config, save_network

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "moe_layers": (1,), "num_experts": 4}


def saved_run(
    folder: Path, name: str, classes: tuple[str, ...], args: dict[str, Any] | None = None, **options: Any
) -> nn.Module:
    """Fills `folder` with best/ and args.yaml, and returns the network in evaluation mode.

    Args:
        folder: Of the run.
        name: A mixture model; it is built small, for 32 pixels, with weights that make it answer differently.
        classes: Names of its classes.
        args: Of the run; None leaves no args.yaml.
        **options: Further arguments of the model.
    """
    kwargs = {**SMALL, **options}
    network = randomize(build_network(name, len(classes), img_size=32, model_kwargs=kwargs), std=0.15).eval()
    save_network(network, folder / "best", classes, data_config(network, 32))
    if args is not None:
        (folder / "args.yaml").write_text(yaml.safe_dump(args))
    return network


def outcome(run: str | os.PathLike[str]) -> tuple[Any, ...]:
    """Numbers and weights of a run with --save-rules oracle, without times."""
    rows = [json.loads(line) for line in Path(run, "results.jsonl").read_text().splitlines()]
    for row in rows:
        del row["step_time"], row["args"]
    return rows, *(Path(run, name, "model.safetensors").read_bytes() for name in ("best", "best_oracle"))
