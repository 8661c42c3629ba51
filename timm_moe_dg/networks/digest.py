"""A digest of everything that decides the logits of a network."""

import hashlib

import torch
from torch import nn

from .trained import WithFeatures

# Attributes of modules that change outputs and are in no weight
BEHAVIOR: tuple[str, ...] = ("expert_mode", "shared_only", "forced_expert", "radius", "top_k", "normalize_weights")
BEHAVIOR += ("scores", "choice")
BEHAVIOR += ("first_frequency", "num_heads", "eps", "approximate", "global_pool", "pool_type", "pool_include_prefix")
BEHAVIOR += ("beta", "stride", "padding", "dilation", "window_size", "shift_size")


def network_digest(model: nn.Module) -> str:
    """Returns the SHA-256 of everything that decides a network's logits: weights, coverage radius and expert mode."""
    network = model.network if isinstance(model, WithFeatures) else model
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for name, module in network.named_modules():
        behavior = {key: vars(module)[key] for key in BEHAVIOR if key in vars(module)}
        digest.update(f"{name} {type(module).__name__} {behavior}".encode())
    return digest.hexdigest()
