"""Converts V-MoE checkpoints (Scaling Vision with Sparse Mixture of Experts, Riquelme et al., 2021), without jax.

V-MoE drops tokens over an expert's capacity in evaluation too. The converted network drops none.

Axes: D features, H hidden features, E experts.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, check_regular_file, needs

Arrays = Mapping[str, Tensor]

# MessagePack extension types of vmoe/checkpoints (serialization.py, partitioned.py)
_ARRAY, _SCALAR, _SLICE, _REGION, _LEAF = 1, 3, 5, 6, 8

Region = tuple[tuple[int, int], ...]  # (start, stop) of each axis


class Leaf(NamedTuple):
    """The index entry of one array."""

    shape: tuple[int, ...]  # of the whole array
    regions: tuple[Region, ...]  # position of each slice in it
    files: tuple[int, ...]  # number of the data file that contains each slice


def read_vmoe_shards(prefix: str | Path) -> dict[str, Tensor]:
    """Reads all arrays of a checkpoint by name ('Encoder/encoderblock_0/LayerNorm_0/scale'), in their original types.

    The prefix is the path without `.index` and `.data-...`, as V-MoE's README lists them.
    """
    index = _read(Path(f"{prefix}.index"))
    try:
        leaves, count = dict(_flatten(index["index"])), index["shard_count"]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{prefix}.index: is no index of a V-MoE checkpoint ({error!r})") from error
    files = [_read(Path(f"{prefix}.data-{number:05d}-of-{count:05d}")) for number in range(count)]
    # A data file stores an array's slices under the array's number in the index
    return {name: _assemble(name, leaf, str(number), files) for number, (name, leaf) in enumerate(leaves.items())}


def _read(path: Path) -> Any:
    with needs("V-MoE's MessagePack files", "msgpack", "vmoe"):
        import msgpack
    try:
        check_regular_file(path)
        return msgpack.unpackb(path.read_bytes(), ext_hook=_decode_extension)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give the prefix of .index and .data files") from error
    except ValueError as error:  # the base class of msgpack's errors
        raise CheckpointError(f"{path}: is damaged, or no file of V-MoE's ({error}); download it again") from error


def _decode_extension(code: int, data: bytes) -> Any:
    import msgpack

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
    raise ValueError(f"extension type {code}")


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
    if slices.keys() != set(leaf.regions) or any(
        slices[region].numel() != math.prod(size) for region, size in sizes.items()
    ):
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


def vmoe_options(arrays: Arrays, top_k: int = 2) -> dict[str, Any]:
    """Derives the arguments of `timm.create_model` from all arrays of a checkpoint.

    Checkpoints do not contain `top_k`, the experts per token. The published networks have 2.
    """
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


def vmoe_preprocessing(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preprocessing of V-MoE's fine-tuned networks: squeezed to size, bilinear, with values in -1..1."""
    size, half = options["img_size"], (0.5, 0.5, 0.5)
    squash = {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"}
    return {"input_size": (3, size, size), "mean": half, "std": half, **squash}


def convert_vmoe_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """Renames and reshapes all arrays to the float32 state dict of the network that `vmoe_options` describes.

    A layer before the classifier is left out together with the classifier, since timm's vision transformers have none.
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
