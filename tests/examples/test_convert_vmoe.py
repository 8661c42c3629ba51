"""examples/convert_vmoe.py: files in V-MoE's layout, made here, become a network that equals its definition."""

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from timm.data import resolve_data_config
from torch import Tensor
from torch.nn import functional as F

from tests.load_tool import load_example
from timm_moe_dg.errors import CheckpointError

CONVERT = vars(load_example("convert_vmoe"))
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
    """Logits of (B, height, width, 3) images, by the network's definition."""
    weights = {name: torch.from_numpy(value).double() for name, value in arrays.items()}

    def dense(x: Tensor, name: str, axes: int = 1) -> Tensor:
        return torch.tensordot(x, weights[f"{name}/kernel"], axes) + weights[f"{name}/bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (FEATURES,), weights[f"{name}/scale"], weights[f"{name}/bias"], eps=1e-6)

    cut = torch.from_numpy(images).double().unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    patches = dense(cut.permute(0, 1, 2, 4, 5, 3), "embedding", 3).flatten(1, 2)
    tokens = torch.cat([weights["cls"].expand(len(images), -1, -1), patches], dim=1)
    tokens = tokens + weights["Encoder/posembed_input/pos_embedding"]
    for index in range(DEPTH):
        block = f"Encoder/encoderblock_{index}"
        x = norm(tokens, f"{block}/LayerNorm_0")
        parts = (f"{block}/SelfAttention/{part}" for part in ("query", "key", "value"))
        query, key, value = (dense(x, part).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        tokens = tokens + dense(attended, f"{block}/SelfAttention/out", 2)
        x = norm(tokens, f"{block}/LayerNorm_1")
        if index not in MOE:
            hidden = F.gelu(dense(x, f"{block}/Mlp/Dense_0"), approximate="tanh")
            tokens = tokens + dense(hidden, f"{block}/Mlp/Dense_1")
            continue
        gates = (x @ weights[f"{block}/Moe/Router/dense/kernel"]).softmax(-1)
        gates = gates.where(gates >= gates.topk(top_k).values[..., -1:], 0.0)
        for expert in range(EXPERTS):  # all tokens, of which most have a gate of 0
            (first, first_bias), (second, second_bias) = (
                [weights[f"{block}/Moe/Mlp/Dense_{layer}/{part}"][expert] for part in ("kernel", "bias")]
                for layer in (0, 1)
            )
            output = F.gelu(x @ first + first_bias, approximate="tanh") @ second + second_bias
            tokens = tokens + gates[..., expert, None] * output
    return dense(norm(tokens, "Encoder/encoder_norm")[:, 0], "head").numpy()


@torch.no_grad()
@pytest.mark.filterwarnings("error:top_k=")
@pytest.mark.parametrize(("before_head", "top_k"), [(False, 1), (False, 2), (False, 3), (True, 2)])
def test_a_checkpoint_becomes_a_folder_that_timm_loads(before_head, top_k, tmp_path, capsys):
    arrays = made_arrays(before_head=before_head)
    write_vmoe(tmp_path / "vmoe", arrays)
    words = [str(tmp_path / "vmoe"), "--output", str(tmp_path / "folder"), "--top-k", str(top_k)]
    CONVERT["main"](words)
    assert f"4 experts in blocks {list(MOE)} of 4" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval().double()
    recipe = resolve_data_config(model=model)  # what V-MoE's configurations call resize(8) and value_range(-1, 1)
    assert (recipe["input_size"], recipe["crop_mode"], recipe["crop_pct"]) == ((3, 8, 8), "squash", 1.0)
    assert (recipe["interpolation"], recipe["mean"], recipe["std"]) == ("bilinear", [0.5] * 3, [0.5] * 3)
    assert model.pretrained_cfg.get("license") is None
    images = np.random.default_rng(1).normal(size=(3, 8, 8, 3))
    logits = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    if before_head:
        assert logits.shape == (3, FEATURES)  # the classifier goes with the layer before it
    else:
        torch.testing.assert_close(logits, torch.from_numpy(answer(arrays, images, top_k)), rtol=0, atol=1e-10)
    with pytest.raises(FileExistsError):
        CONVERT["main"](words)


@pytest.mark.parametrize(("files", "parts"), [(1, 1), (2, 2), (3, 4)])
def test_arrays_come_back_as_they_were_whatever_they_were_cut_into(files, parts, tmp_path):
    # Names of eleven blocks, so that 10 sorts before 2
    arrays = made_arrays() | {f"Encoder/encoderblock_{n}/LayerNorm_0/scale": np.full(3, n, "float32") for n in (10, 11)}
    write_vmoe(tmp_path / "vmoe", arrays, files, parts)
    loaded = CONVERT["read_arrays"](tmp_path / "vmoe")
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in arrays.items())


@pytest.mark.parametrize(
    ("function", "changes", "named"),
    [
        ("convert_arrays", {"Encoder/encoderblock_1/Moe/Router/dense/kernel": (2, 12, 2)}, "Router"),  # an ensemble
        ("convert_arrays", {"MapHead/probe": (1, 1, 12)}, "MapHead/probe"),
        ("network_options", {"cls": None}, "lacks cls"),
    ],
)
def test_other_networks_are_refused(function, changes, named):
    arrays = {name: torch.from_numpy(value) for name, value in made_arrays().items() if name not in changes}
    arrays |= {name: torch.zeros(shape) for name, shape in changes.items() if shape}
    with pytest.raises(CheckpointError, match=named):
        CONVERT[function](arrays)
