"""Converts a published checkpoint of V-MoE to a model folder that timm loads. It needs msgpack, and no jax.

    python examples/convert_vmoe.py DOWNLOADS/vmoe_b16_imagenet21k_randaug_strong --output output/vmoe
    timm-moe-dg finetune --model local-dir:output/vmoe --pretrained --dataset PACS --data-dir DATA

The first argument is the common prefix of PREFIX.index, PREFIX.data-00000-of-00008 and so on. V-MoE (Riquelme et al.,
2021) drops tokens over an expert's capacity in evaluation too. The converted network drops none. A layer before the
classifier, which networks have that were not fine-tuned, is left out together with the classifier.

Axes: D features, E experts.
"""

import argparse
import math
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import timm
import torch
from torch import Tensor

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.hub.folder import fill_from_network
from timm_moe_dg.networks.build import without_origin

Arrays = Mapping[str, Tensor]

# MessagePack extension types of vmoe/checkpoints (serialization.py, partitioned.py)
_ARRAY, _SCALAR, _SLICE, _REGION, _LEAF = 1, 3, 5, 6, 8

Region = tuple[tuple[int, int], ...]  # (start, stop) of each axis


class Leaf(NamedTuple):
    """The index entry of one array."""

    shape: tuple[int, ...]  # of the whole array
    regions: tuple[Region, ...]  # position of each slice in it
    files: tuple[int, ...]  # number of the data file that contains each slice


def read_arrays(prefix: str | Path) -> dict[str, Tensor]:
    """Reads all arrays by name ('Encoder/encoderblock_0/LayerNorm_0/scale'), in their original types."""
    index = _read(Path(f"{prefix}.index"))
    count = index["shard_count"]
    files = [_read(Path(f"{prefix}.data-{number:05d}-of-{count:05d}")) for number in range(count)]
    # A data file stores an array's slices under the array's number in the index
    leaves = enumerate(_flatten(index["index"]))
    return {name: _assemble(name, leaf, str(number), files) for number, (name, leaf) in leaves}


def _read(path: Path) -> Any:
    return msgpack.unpackb(path.read_bytes(), ext_hook=_decode_extension)


def _decode_extension(code: int, data: bytes) -> Any:
    content = msgpack.unpackb(data, raw=True)  # raw: strings stay bytes
    if code in (_ARRAY, _SCALAR):
        shape, dtype, buffer = content
        return torch.frombuffer(bytearray(buffer), dtype=getattr(torch, dtype.decode())).reshape(shape)
    if code == _SLICE:
        start, stop, _ = content
        return start, stop
    if code == _REGION:
        return tuple(_decode_extension(_SLICE, bounds) for bounds in content)
    if code == _LEAF:
        array, regions, files = content
        shape = msgpack.unpackb(array, raw=True)[0]
        return Leaf(tuple(shape), tuple(_decode_extension(_REGION, region) for region in regions), tuple(files))
    raise CheckpointError(f"extension type {code} is none of V-MoE's")


def _flatten(tree: dict[str, Any], parent: str = "") -> Iterator[tuple[str, Leaf]]:
    # jax sorts names level by level: 'a/b' precedes 'a-c'
    for name, branch in sorted(tree.items()):
        if isinstance(branch, Leaf):
            yield f"{parent}{name}", branch
        else:
            yield from _flatten(branch, f"{parent}{name}/")


def _assemble(name: str, leaf: Leaf, number: str, files: list[dict[str, Any]]) -> Tensor:
    slices = {region: torch.cat(parts) for file in set(leaf.files) for parts, region in files[file].get(number, ())}
    sizes = {region: [stop - start for start, stop in region] for region in leaf.regions}
    if slices.keys() != sizes.keys() or any(len(slices[region]) != math.prod(sizes[region]) for region in sizes):
        raise CheckpointError(f"{name}: data files lack slices that the index names; download them again")
    array = torch.empty(leaf.shape, dtype=next(iter(slices.values())).dtype)
    for region, part in slices.items():
        array[tuple(slice(*bounds) for bounds in region)] = part.reshape(sizes[region])
    return array


_MODULES = {"embedding": "patch_embed.proj", "Encoder/encoder_norm": "norm", "head": "head"}
_IN_BLOCK = {
    "LayerNorm_0": "norm1",
    "LayerNorm_1": "norm2",
    "SelfAttention/query": "attn.qkv",  # timm's layer is these three, in this order
    "SelfAttention/key": "attn.qkv",
    "SelfAttention/value": "attn.qkv",
    "SelfAttention/out": "attn.proj",
    "Mlp/Dense_0": "mlp.fc1",
    "Mlp/Dense_1": "mlp.fc2",
    "Moe/Mlp/Dense_0": "mlp.experts.fc1",
    "Moe/Mlp/Dense_1": "mlp.experts.fc2",
    "Moe/Router/dense": "mlp.router.gate",
}
_BLOCK = re.compile(r"Encoder/encoderblock_(\d+)/(.+)")
_BEFORE_HEAD = "pre_logits/"  # a layer with tanh, only in networks before fine-tuning
_HEADS = ("pre_logits", "head")


def network_options(arrays: Arrays, top_k: int = 2) -> dict[str, Any]:
    """Derives the arguments of `timm.create_model` from all arrays of a checkpoint."""
    matches = [match for match in map(_BLOCK.fullmatch, arrays) if match]
    sparse = sorted({int(match[1]) for match in matches if match[2] == "Moe/Router/dense/kernel"})
    needed = ("embedding/kernel", "cls", "Encoder/posembed_input/pos_embedding")
    missing = [name for name in needed if name not in arrays] + ["Moe/Router/dense/kernel"] * (not sparse)
    if missing:
        raise CheckpointError(f"is no V-MoE with a class token and learned positions: it lacks {', '.join(missing)}")
    patch, _, _, features = arrays["embedding/kernel"].shape
    first = f"Encoder/encoderblock_{sparse[0]}"
    with_head = "head/kernel" in arrays and not any(name.startswith(_BEFORE_HEAD) for name in arrays)
    return {
        "model_name": "gmoe",
        "backbone": "vit_base_patch16_224",
        "img_size": patch * math.isqrt(arrays["Encoder/posembed_input/pos_embedding"].shape[1] - 1),
        "patch_size": patch,
        "embed_dim": features,
        "depth": 1 + max(int(match[1]) for match in matches),
        "num_heads": arrays[f"{first}/SelfAttention/query/kernel"].shape[1],
        "mlp_ratio": arrays[f"{first}/Moe/Mlp/Dense_0/kernel"].shape[-1] / features,
        "act_layer": "gelu_tanh",  # flax's default form of GELU
        "num_classes": arrays["head/kernel"].shape[1] if with_head else 0,
        "moe_layers": sparse,
        "num_experts": arrays[f"{first}/Moe/Router/dense/kernel"].shape[-1],
        "top_k": top_k,
        "router": "linear",
        "normalize_weights": False,  # V-MoE combines by raw softmax weights
        "expert_drop": 0.0,
    }


def convert_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """Renames and reshapes all arrays to the float32 state dict of the network that `network_options` describes.

    Arrays of another kind of network, such as efficient ensembles (E3), are a `CheckpointError`.
    """
    headless = any(name.startswith(_BEFORE_HEAD) for name in arrays)
    used = {name: value for name, value in arrays.items() if not headless or name.partition("/")[0] not in _HEADS}
    new_names = _new_names({match[1] for match in map(_BLOCK.fullmatch, used) if match})
    # The router of an ensemble has an additional axis, its members
    of_ensemble = {name for name in used if "/Router/" in name and used[name].ndim != 2}
    if unknown := sorted(of_ensemble | (used.keys() - new_names.keys())):
        raise CheckpointError(f"has arrays that no V-MoE of this kind has ({len(unknown)}): {'; '.join(unknown[:4])}")
    parts: dict[str, list[Tensor]] = {}
    for name, new in new_names.items():
        if name in used:
            parts.setdefault(new, []).append(_to_torch(name, used[name]))
    return {new: torch.cat(values).float().contiguous() for new, values in parts.items()}


def _new_names(blocks: Collection[str]) -> dict[str, str]:
    modules = {f"Encoder/encoderblock_{n}/{old}": f"blocks.{n}.{new}" for n in blocks for old, new in _IN_BLOCK.items()}
    names = {"cls": "cls_token", "Encoder/posembed_input/pos_embedding": "pos_embed"}
    for old, new in (_MODULES | modules).items():
        names |= {f"{old}/{'scale' if 'norm' in new else 'kernel'}": f"{new}.weight", f"{old}/bias": f"{new}.bias"}
    return names


def _to_torch(name: str, value: Tensor) -> Tensor:
    if not name.endswith("kernel"):
        return value.flatten() if "SelfAttention" in name else value
    if name == "embedding/kernel":  # (height, width, channels, D)
        return value.permute(3, 2, 0, 1)
    if "SelfAttention" in name:  # (heads, D / heads, D), or (D, heads, D / heads) of query, key and value
        value = value.flatten(0, 1) if "/out/" in name else value.flatten(1)
    # flax stores (..., inputs, outputs)
    return value.transpose(-1, -2)


def main(argv: Sequence[str]) -> None:
    """Reads a checkpoint, converts it and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="path of the files without .index and .data-...")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder")
    help_ = "experts per token, which the files do not contain (default: %(default)s, as in all published networks)"
    parser.add_argument("--top-k", type=int, default=2, metavar="K", help=help_)
    args = parser.parse_args(argv)
    arrays = read_arrays(args.prefix)
    options = network_options(arrays, args.top_k)
    with warnings.catch_warnings():
        # Upcycling warns about raw combine weights, but V-MoE was trained with them
        warnings.filterwarnings("ignore", message="top_k=")
        model: Any = timm.create_model(**options)
    model.load_state_dict(convert_arrays(arrays))
    # The preprocessing of V-MoE's fine-tuned networks: squeezed to size, bilinear, with values in -1..1
    size, half = options["img_size"], (0.5, 0.5, 0.5)
    config = {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear", "mean": half, "std": half}
    model.pretrained_cfg = without_origin(model.pretrained_cfg) | config | {"input_size": (3, size, size)}
    model.default_cfg = model.pretrained_cfg
    args.output.mkdir(parents=True)
    fill_from_network(args.output, model)
    print(f"{args.prefix}: {options['num_experts']} experts in blocks {options['moe_layers']} of {options['depth']}")
    print(f"model: timm.create_model('local-dir:{args.output}', pretrained=True)")


if __name__ == "__main__":
    main(sys.argv[1:])
