"""Checkpoints as google-research/vmoe writes them, PREFIX.index and PREFIX.data-00000-of-00008, without jax.

The index is a tree of names. Each leaf says how large an array is, into which slices it was cut and which file holds
them; a file holds slices under the array's number in the tree, sorted by name at each level. Both are MessagePack with
extension types of their own (vmoe/checkpoints: serialization.py, partitioned.py).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, MissingDependencyError

_ARRAY, _SCALAR, _SLICE, _REGION, _LEAF = 1, 3, 5, 6, 8  # their numbers of the extension types

Region = tuple[tuple[int, int], ...]  # first and last + 1 of each axis


class Leaf(NamedTuple):
    """What the index says of one array.

    Attributes:
        shape: Of the whole.
        regions: Where each of its slices lies.
        files: Which file holds each of them.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    files: tuple[int, ...]


def read_vmoe_shards(prefix: str | Path) -> dict[str, Tensor]:
    """Reads all arrays of a checkpoint.

    Args:
        prefix: Path without `.index` and `.data-...`, as V-MoE's README lists them.

    Returns:
        Name ('Encoder/encoderblock_0/LayerNorm_0/scale') -> array as it was saved.

    Raises:
        MissingDependencyError: msgpack is not installed.
        CheckpointError: A file is missing, is no such file, or does not hold what the index says.
    """
    index = _read(Path(f"{prefix}.index"))
    try:
        leaves, count = dict(_flattened(index["index"])), index["shard_count"]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{prefix}.index: is no index of a V-MoE checkpoint ({error!r})") from error
    files = [_read(Path(f"{prefix}.data-{number:05d}-of-{count:05d}")) for number in range(count)]
    return {name: _assembled(name, leaf, str(number), files) for number, (name, leaf) in enumerate(leaves.items())}


def _read(path: Path) -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MissingDependencyError.of("V-MoE's MessagePack files", "msgpack", "vmoe") from error
    try:
        return msgpack.unpackb(path.read_bytes(), ext_hook=_extension)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; give the prefix of .index and .data files") from error
    except ValueError as error:  # msgpack's own errors are such
        raise CheckpointError(f"{path}: is damaged, or no file of V-MoE's ({error}); download it again") from error


def _extension(code: int, data: bytes) -> Any:
    """One of their types; strings inside are bytes."""
    import msgpack

    content = msgpack.unpackb(data, raw=True)
    if code in (_ARRAY, _SCALAR):
        shape, dtype, buffer = content
        return torch.frombuffer(bytearray(buffer), dtype=getattr(torch, dtype.decode())).reshape(shape)
    if code == _SLICE:
        start, stop, _ = content
        return start, stop
    if code == _REGION:
        return tuple(_extension(_SLICE, one) for one in content)
    if code == _LEAF:
        array, regions, files = content
        shape = msgpack.unpackb(array, raw=True)[0]
        return Leaf(tuple(shape), tuple(_extension(_REGION, one) for one in regions), tuple(files))
    raise ValueError(f"extension type {code}")


def _flattened(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Leaf]]:
    """Names of the leaves in the order in which jax numbers them."""
    for name, branch in sorted(tree.items()):
        if isinstance(branch, Leaf):
            yield f"{above}{name}", branch
        else:
            yield from _flattened(branch, f"{above}{name}/")


def _assembled(name: str, leaf: Leaf, number: str, files: list[dict[str, Any]]) -> Tensor:
    """Puts the slices of one array together.

    Raises:
        CheckpointError: They are not those that the index names.
    """
    found = {region: torch.cat(parts) for file in set(leaf.files) for parts, region in files[file].get(number, ())}
    sizes = {region: [stop - start for start, stop in region] for region in leaf.regions}
    if found.keys() != set(leaf.regions) or any(found[one].numel() != math.prod(sizes[one]) for one in sizes):
        raise CheckpointError(f"{name}: data files lack slices that the index names; download them again")
    whole = torch.empty(leaf.shape, dtype=next(iter(found.values())).dtype)
    for region, part in found.items():
        whole[tuple(slice(*bounds) for bounds in region)] = part.reshape(sizes[region])
    return whole
