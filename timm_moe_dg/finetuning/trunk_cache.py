"""Outputs of a frozen trunk, computed once for all images, in files that runs and processes share.

A file holds the tokens of all domains' images, one after the other, and their digest. Its name is a digest of
everything that its values depend on.
"""

import hashlib
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from timm.layers import DropPath
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..algorithms.averaging import frozen_copy
from ..data import Domain, EvaluationImages, Split, evaluation_loader, evaluation_transform
from ..errors import ArgumentError
from ..networks.build import DataConfig, Network
from ..networks.freeze import TRUNK_TOKENS, trunk_depth, trunk_modules
from ..protocols.run_identity import stamp
from ..storage.files import explained, lock_file, replaced_file
from .plan import RunPlan

FOLDER = "trunk-cache"  # below --output
DIGEST = hashlib.sha256().digest_size
_TRUNK = (*TRUNK_TOKENS, "patch_embed", "norm_pre", "blocks")  # starts of names of weights
_logger = logging.getLogger(__name__)


class TokenDomain(Domain[np.ndarray]):
    """A domain with tokens (N, D) in place of images."""

    def image(self, index: int) -> Tensor:  # type: ignore[override]
        """Returns the tokens of one image, in float32."""
        return torch.from_numpy(self.images[index].astype(np.float32))

    pixels = image


def token_domains(domains: Sequence[Domain], tokens: np.ndarray) -> list[Domain]:
    """Returns the domains with their part of the tokens in place of images."""
    parts = np.split(tokens, np.cumsum([len(domain) for domain in domains])[:-1])
    columns = [{item.name: getattr(domain, item.name) for item in fields(Domain)} for domain in domains]
    return [TokenDomain(**{**column, "images": part}) for column, part in zip(columns, parts, strict=True)]


def cache_trunk(network: Network, plan: RunPlan, config: DataConfig, device: torch.device) -> np.ndarray:
    """Lets a network start at the outputs of its frozen trunk, in place of images, and returns those of all images.

    Returns:
        Tokens (images, N, D) in the order of the domains, mapped to memory. In a dry run all are zero, and no file is
        written.

    Raises:
        ArgumentError: The network has no trunk, or the disk has too little space.
        StorageError: The file cannot be written.
    """
    options = plan.options
    depth = trunk_depth(network, str(options.freeze))
    trunk: Network = frozen_copy(network).to(device)
    del trunk.blocks[depth:]
    first = torch.zeros(1, *config["input_size"], device=device)
    embedded = trunk._pos_embed(trunk.patch_embed(first))
    rotations = embedded[1] if isinstance(embedded, tuple) else None
    shape = (sum(map(len, plan.domains)), *_outputs(trunk, first)[0].shape)
    for module in trunk_modules(network, depth):
        module.forward = _skip
    network._pos_embed = _skip if rotations is None else partial(_skip_rotated, rotations)
    dtype = np.dtype(options.cache_trunk)
    if options.dry_run:
        return np.broadcast_to(np.zeros((), dtype), shape)
    path = Path(options.output, FOLDER, _key(trunk, plan, config, rotations))
    size = math.prod(shape) * dtype.itemsize
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock_file(path)):  # held while one process computes and others wait
            if not _is_intact(path, size):
                _compute(trunk, plan, config, path, size)
    _logger.info(f"training images are not augmented: {path} has the outputs of {depth} blocks for them")
    return np.memmap(path, dtype, "r", shape=shape)


def _is_intact(path: Path, size: int) -> bool:
    """Whether a file holds `size` bytes and their digest."""
    if not path.is_file() or path.stat().st_size != size + DIGEST:
        return False
    content = np.memmap(path, np.uint8, "r")
    return hashlib.sha256(content[:size].data).digest() == content[size:].tobytes()


def _skip(tokens: Tensor, *_: object, **__: object) -> Tensor:
    return tokens


def _skip_rotated(rotations: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return tokens, rotations  # rotary positions, which every block reads


@torch.no_grad()
def _outputs(trunk: Network, images: Tensor) -> Tensor:
    """(B, C, height, width) -> (B, N, D), prefix tokens first."""
    has_prefix = bool(trunk.num_prefix_tokens)
    options = {"output_fmt": "NLC", "intermediates_only": True, "return_prefix_tokens": has_prefix}
    (tokens,) = trunk.forward_intermediates(images, 1, **options)
    return torch.cat([tokens[1], tokens[0]], dim=1) if has_prefix else tokens


def _key(trunk: Network, plan: RunPlan, config: DataConfig, rotations: Tensor | None) -> str:
    """Returns the digest of weights and structure, images, transform and type."""
    images = [plan.record_args["data"], *((domain.bands, domain.upright) for domain in plan.domains)]
    # Rates of stochastic depth differ between runs, and names of blocks between networks with the same trunk
    parts = [
        part for block in trunk.blocks for part in block.children() if not isinstance(part, DropPath | nn.Identity)
    ]
    structure = [(str(part), getattr(part, "num_heads", None)) for part in parts]
    facts = [stamp(), images, config, structure, plan.options.cache_trunk]
    digest = hashlib.sha256(repr(facts).encode())
    weights = {name: value for name, value in trunk.state_dict().items() if name.startswith(_TRUNK)}
    for name, value in {**weights, **({} if rotations is None else {"rotations": rotations})}.items():
        digest.update(f"{name} {tuple(value.shape)}".encode() + value.cpu().numpy().tobytes())
    return digest.hexdigest()


def _compute(trunk: Network, plan: RunPlan, config: DataConfig, path: Path, size: int) -> None:
    """Writes the outputs for all images, `size` bytes."""
    options, free = plan.options, shutil.disk_usage(path.parent).free
    if free < size:
        remedy = f"{path.parent} needs {size / 1e6:.0f} MB and has {free / 1e6:.0f} MB; free some space"
        raise ArgumentError.of("cache_trunk", options.cache_trunk, f"{remedy}, or give another --output")
    _logger.info(f"computing the outputs of frozen blocks once for all images, {size / 1e6:.0f} MB")
    whole = [Split(np.arange(len(domain)), np.arange(0)) for domain in plan.domains]
    transform = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
    images = EvaluationImages(plan.domains, whole, transform)
    loader = evaluation_loader(images, batch_size=options.validation_batch_size, workers=options.workers)
    device = next(trunk.parameters()).device
    digest = hashlib.sha256()
    with replaced_file(path) as fresh, fresh.open("wb") as file:
        for batch, *_ in tqdm(loader, unit="batch", disable=None):
            tokens = _outputs(trunk, batch.to(device)).cpu().numpy().astype(options.cache_trunk)
            if not np.isfinite(tokens).all():
                remedy = "outputs of the frozen blocks exceed this type; give --cache-trunk float32"
                raise ArgumentError.of("cache_trunk", options.cache_trunk, remedy)
            digest.update(content := tokens.tobytes())
            file.write(content)
        file.write(digest.digest())
