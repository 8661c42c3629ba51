"""V-MoE checkpoints as google-research/vmoe writes them, made here: arrays in its layout, and files of them."""

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
FEATURES, HIDDEN, HEADS, EXPERTS, CLASSES, PATCH, DEPTH = 12, 20, 3, 4, 5, 4, 4
MOE = (1, 3)


def made_arrays(seed: int = 0, before_head: bool = False) -> Arrays:
    """A small network: mixtures in the odd blocks, images of 8 pixels in four patches."""
    draw = np.random.default_rng(seed)

    def array(*shape: int) -> NDArray[Any]:
        return draw.normal(0, 0.3, shape).astype(np.float32)

    def dense(name: str, *shape: int, outputs: tuple[int, ...]) -> Arrays:
        return {f"{name}/kernel": array(*shape, *outputs), f"{name}/bias": array(*outputs)}

    arrays = {"cls": array(1, 1, FEATURES), "Encoder/posembed_input/pos_embedding": array(1, 5, FEATURES)}
    arrays |= dense("embedding", PATCH, PATCH, 3, outputs=(FEATURES,)) | dense("head", FEATURES, outputs=(CLASSES,))
    if before_head:
        arrays |= dense("pre_logits", FEATURES, outputs=(FEATURES,))
    norms = ["Encoder/encoder_norm"]
    for index in range(DEPTH):
        block = f"Encoder/encoderblock_{index}"
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_1"]
        for part in ("query", "key", "value"):
            arrays |= dense(f"{block}/SelfAttention/{part}", FEATURES, outputs=(HEADS, FEATURES // HEADS))
        arrays |= dense(f"{block}/SelfAttention/out", HEADS, FEATURES // HEADS, outputs=(FEATURES,))
        if index in MOE:
            arrays[f"{block}/Moe/Router/dense/kernel"] = array(FEATURES, EXPERTS)
            for layer, (inputs, outputs) in enumerate([(FEATURES, HIDDEN), (HIDDEN, FEATURES)]):
                name = f"{block}/Moe/Mlp/Dense_{layer}"
                arrays |= {f"{name}/kernel": array(EXPERTS, inputs, outputs), f"{name}/bias": array(EXPERTS, outputs)}
        else:
            arrays |= dense(f"{block}/Mlp/Dense_0", FEATURES, outputs=(HIDDEN,))
            arrays |= dense(f"{block}/Mlp/Dense_1", HIDDEN, outputs=(FEATURES,))
    for name in norms:
        arrays |= {f"{name}/scale": 1 + array(FEATURES), f"{name}/bias": array(FEATURES)}
    return arrays


def write_vmoe(prefix: Path, arrays: Arrays, files: int = 2, parts: int = 2) -> None:
    """Writes PREFIX.index and its data files; the experts' arrays are cut along their first axis."""
    tree: dict[str, Any] = {}
    shards: list[dict[str, Any]] = [{"__msgpack_array_chunk_a87ca2__": True} for _ in range(files)]
    for number, name in enumerate(sorted(arrays, key=lambda path: path.split("/"))):
        array = arrays[name]
        cuts = np.array_split(np.arange(array.shape[0]), parts if "Moe/Mlp" in name else 1)
        regions = [((int(cut[0]), int(cut[-1]) + 1), *((0, side) for side in array.shape[1:])) for cut in cuts]
        holders = [(number + cut) % files for cut in range(len(cuts))]
        for region, holder in zip(regions, holders, strict=True):
            flat = array[region[0][0] : region[0][1]].ravel()
            pieces = [_ndarray(flat[: len(flat) // 2 + 1]), _ndarray(flat[len(flat) // 2 + 1 :])]
            shards[holder].setdefault(str(number), []).append([pieces, msgpack.ExtType(6, _region(region))])
        shape = _pack((array.shape, array.dtype.name, False, {}))
        leaf = msgpack.ExtType(8, _pack((shape, tuple(map(_region, regions)), tuple(holders))))
        *branches, last = name.split("/")
        branch = tree
        for step in branches:
            branch = branch.setdefault(step, {})
        branch[last] = leaf
    index = {"shard_count": files, "index": tree, "version": "20220622"}
    Path(f"{prefix}.index").write_bytes(_pack(index))
    for number, shard in enumerate(shards):
        Path(f"{prefix}.data-{number:05d}-of-{files:05d}").write_bytes(_pack(shard))


def _pack(content: Any) -> bytes:
    return msgpack.packb(content, use_bin_type=True)


def _region(region: tuple[tuple[int, int], ...]) -> bytes:
    return _pack(tuple(_pack((start, stop, None)) for start, stop in region))


def _ndarray(array: NDArray[Any]) -> msgpack.ExtType:
    return msgpack.ExtType(1, _pack((array.shape, array.dtype.name, array.tobytes())))


def answer(arrays: Arrays, images: NDArray[Any], top_k: int = 2) -> NDArray[Any]:
    """Logits of (B, height, width, 3) images, by the network's definition and token by token."""
    return np.stack([_one(arrays, image.astype(np.float64), top_k) for image in images])


def _one(arrays: Arrays, image: NDArray[Any], top_k: int) -> NDArray[Any]:
    kernel = arrays["embedding/kernel"]
    corners = [(y, x) for y in range(0, image.shape[0], PATCH) for x in range(0, image.shape[1], PATCH)]
    patches = [np.tensordot(image[y : y + PATCH, x : x + PATCH], kernel, axes=3) for y, x in corners]
    tokens = np.vstack([arrays["cls"][0], np.stack(patches) + arrays["embedding/bias"]])
    tokens = tokens + arrays["Encoder/posembed_input/pos_embedding"][0]
    for index in range(DEPTH):
        block = {
            name.removeprefix(f"Encoder/encoderblock_{index}/"): value
            for name, value in arrays.items()
            if name.startswith(f"Encoder/encoderblock_{index}/")
        }
        tokens = tokens + _attend(block, _norm(block, "LayerNorm_0", tokens))
        tokens = tokens + np.stack([_feed(block, token, top_k) for token in _norm(block, "LayerNorm_1", tokens)])
    return _norm(arrays, "Encoder/encoder_norm", tokens)[0] @ arrays["head/kernel"] + arrays["head/bias"]


def _norm(arrays: Arrays, name: str, tokens: NDArray[Any]) -> NDArray[Any]:
    centered = tokens - tokens.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * arrays[f"{name}/scale"] + arrays[f"{name}/bias"]


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    exponents = np.exp(scores - scores.max())
    return exponents / exponents.sum()


def _attend(block: Arrays, tokens: NDArray[Any]) -> NDArray[Any]:
    made = {}
    for part in ("query", "key", "value"):
        weights, bias = block[f"SelfAttention/{part}/kernel"], block[f"SelfAttention/{part}/bias"]
        made[part] = np.einsum("td,dhf->thf", tokens, weights) + bias
    outputs = np.zeros_like(tokens)
    for token in range(len(tokens)):
        for head in range(HEADS):
            scores = made["key"][:, head] @ made["query"][token, head] / np.sqrt(FEATURES // HEADS)
            outputs[token] += _softmax(scores) @ made["value"][:, head] @ block["SelfAttention/out/kernel"][head]
    return outputs + block["SelfAttention/out/bias"]


def _feed(block: Arrays, token: NDArray[Any], top_k: int) -> NDArray[Any]:
    if "Moe/Router/dense/kernel" not in block:
        return _mlp(block, "Mlp", token)
    weights = _softmax(token @ block["Moe/Router/dense/kernel"])
    chosen = np.argsort(-weights)[:top_k]
    experts = [{name: value[expert] for name, value in block.items() if "Moe/Mlp" in name} for expert in chosen]
    return sum(weights[i] * _mlp(expert, "Moe/Mlp", token) for i, expert in zip(chosen, experts, strict=True))


def _mlp(arrays: Arrays, name: str, token: NDArray[Any]) -> NDArray[Any]:
    hidden = token @ arrays[f"{name}/Dense_0/kernel"] + arrays[f"{name}/Dense_0/bias"]
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return hidden @ arrays[f"{name}/Dense_1/kernel"] + arrays[f"{name}/Dense_1/bias"]
