"""V-MoE's arrays under this package's names (Scaling Vision with Sparse Mixture of Experts, Riquelme et al., 2021).

A V-MoE is a vision transformer with a linear router, raw softmax weights for the best two of eight experts, and GELU by
its tanh approximation, flax's default. Its network is google-research/vmoe's `VisionTransformerMoe`; that drops tokens
over an expert's capacity in evaluation too, which is not done here.

Axes: D features, H hidden features, E experts.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError

Arrays = Mapping[str, Tensor]

_NAMES = {
    "embedding/kernel": "patch_embed.proj.weight",
    "embedding/bias": "patch_embed.proj.bias",
    "cls": "cls_token",
    "Encoder/posembed_input/pos_embedding": "pos_embed",
    "Encoder/encoder_norm/scale": "norm.weight",
    "Encoder/encoder_norm/bias": "norm.bias",
    "head/kernel": "head.weight",
    "head/bias": "head.bias",
}
_IN_BLOCK = {
    "LayerNorm_0/scale": "norm1.weight",
    "LayerNorm_0/bias": "norm1.bias",
    "LayerNorm_1/scale": "norm2.weight",
    "LayerNorm_1/bias": "norm2.bias",
    "SelfAttention/out/kernel": "attn.proj.weight",
    "SelfAttention/out/bias": "attn.proj.bias",
    "Mlp/Dense_0/kernel": "mlp.fc1.weight",
    "Mlp/Dense_0/bias": "mlp.fc1.bias",
    "Mlp/Dense_1/kernel": "mlp.fc2.weight",
    "Mlp/Dense_1/bias": "mlp.fc2.bias",
    "Moe/Mlp/Dense_0/kernel": "mlp.experts.fc1.weight",
    "Moe/Mlp/Dense_0/bias": "mlp.experts.fc1.bias",
    "Moe/Mlp/Dense_1/kernel": "mlp.experts.fc2.weight",
    "Moe/Mlp/Dense_1/bias": "mlp.experts.fc2.bias",
    "Moe/Router/dense/kernel": "mlp.router.gate.weight",
}
_BLOCK = re.compile(r"Encoder/encoderblock_(\d+)/(.+)")
_PROJECTION = re.compile(r"SelfAttention/(query|key|value)/(kernel|bias)")
_BEFORE_HEAD = "pre_logits/"  # a layer with tanh, which networks before fine-tuning have
_HEADS = ("pre_logits", "head")


def vmoe_options(arrays: Arrays, top_k: int = 2) -> dict[str, Any]:
    """Arguments of `timm.create_model` that build the network.

    Args:
        arrays: All arrays of a checkpoint.
        top_k: Experts per token, which no array tells; the published networks have two.

    Raises:
        CheckpointError: It lacks arrays that every V-MoE has.
    """
    blocks = [found for found in map(_BLOCK.fullmatch, arrays) if found]
    sparse = sorted({int(found[1]) for found in blocks if found[2] == "Moe/Router/dense/kernel"})
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
        "depth": 1 + max(int(found[1]) for found in blocks),
        "num_heads": arrays[f"{first}/SelfAttention/query/kernel"].shape[1],
        "mlp_ratio": arrays[f"{first}/Moe/Mlp/Dense_0/kernel"].shape[-1] / features,
        "act_layer": "gelu_tanh",
        "num_classes": arrays["head/kernel"].shape[1] if with_head else 0,
        "moe_layers": sparse,
        "num_experts": arrays[f"{first}/Moe/Router/dense/kernel"].shape[-1],
        "top_k": top_k,
        "router": "linear",
        "normalize_weights": False,
        "expert_drop": 0.0,
    }


def convert_vmoe_arrays(arrays: Arrays) -> dict[str, Tensor]:
    """A state dict for the network that `vmoe_options` describes.

    A layer before the classifier is left out with the classifier: timm's vision transformers have none.

    Args:
        arrays: All arrays of a checkpoint.

    Returns:
        Name -> float32 weights.

    Raises:
        CheckpointError: It holds arrays that no such network has, as those of efficient ensembles (E3) do.
    """
    headless = any(name.startswith(_BEFORE_HEAD) for name in arrays)
    kept = {name: value for name, value in arrays.items() if not headless or name.partition("/")[0] not in _HEADS}
    projections = {name for name in kept if (found := _BLOCK.fullmatch(name)) and _PROJECTION.fullmatch(found[2])}
    renamed = {name: _renamed(name) for name in kept.keys() - projections}
    strange = sorted(name for name, ours in renamed.items() if ours is None or _is_strange(name, kept[name]))
    if strange:
        raise CheckpointError(f"has arrays that no V-MoE of this kind has ({len(strange)}): {'; '.join(strange[:4])}")
    loaded = {ours: _as_torch(name, kept[name]) for name, ours in renamed.items() if ours is not None}
    return {name: value.float().contiguous() for name, value in (loaded | _attention(kept, projections)).items()}


def _renamed(name: str) -> str | None:
    found = _BLOCK.fullmatch(name)
    if found is None:
        return _NAMES.get(name)
    ours = _IN_BLOCK.get(found[2])
    return ours and f"blocks.{found[1]}.{ours}"


def _is_strange(name: str, value: Tensor) -> bool:
    """An ensemble's router has an axis of its members."""
    return name.endswith("Router/dense/kernel") and value.ndim != 2


def _as_torch(name: str, value: Tensor) -> Tensor:
    """Flax multiplies from the left: (inputs, outputs); the attention's last map has heads first."""
    if not name.endswith("kernel"):
        return value
    if name == "embedding/kernel":  # (height, width, channels, D)
        return value.permute(3, 2, 0, 1)
    if name.endswith("out/kernel"):
        value = value.flatten(0, 1)
    return value.transpose(-1, -2)


def _attention(arrays: Arrays, names: set[str]) -> dict[str, Tensor]:
    """Queries, keys and values of each block, (D, heads, D / heads) each, as timm packs them."""
    packed: dict[str, Tensor] = {}
    for block in {name.partition("/SelfAttention")[0] for name in names}:
        ours = f"blocks.{block.rpartition('_')[2]}.attn.qkv"
        parts = [f"{block}/SelfAttention/{part}" for part in ("query", "key", "value")]
        kernels = [arrays[f"{part}/kernel"].flatten(1).t() for part in parts]
        biases = [arrays[f"{part}/bias"].flatten() for part in parts]
        packed |= {f"{ours}.weight": torch.cat(kernels), f"{ours}.bias": torch.cat(biases)}
    return packed
