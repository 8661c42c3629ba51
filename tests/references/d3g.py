"""D3G in the form of Crasto (2025), written from its formulas: one image, one head and one product at a time."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def cosine(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum() / ((first * first).sum().sqrt() * (second * second).sum().sqrt())


def relations(
    domain: int,
    lonlat: Sequence[float],
    num_domains: int,
    beta: float,
    scale: Tensor,
    key: Callable[[Tensor], Tensor],
    query: Callable[[Tensor], Tensor] | None,
) -> list[Tensor]:
    """The relation of a place in `domain` to each domain. `query` is None for D3G without WRAP."""
    if query is None:
        asked = key(torch.tensor([float(domain)], dtype=scale.dtype))
    else:
        longitude, latitude = (math.radians(angle) for angle in lonlat)
        wrapped = [math.cos(longitude), math.cos(latitude), math.sin(longitude), math.sin(latitude)]
        asked = query(torch.tensor(wrapped, dtype=scale.dtype))
    result = []
    for other in range(num_domains):
        learned = cosine(scale * asked, scale * key(torch.tensor([float(other)], dtype=scale.dtype)))
        result.append(beta * (other == domain) + (1 - beta) * learned)
    return result


def mean_logits(logits: list[Tensor], weights: list[Tensor], without: int | None = None) -> Tensor:
    """The mean of the heads' logits with these weights, possibly without one head."""
    kept = [head for head in range(len(logits)) if head != without]
    total = torch.stack([weights[head] for head in kept]).sum()
    return torch.stack([weights[head] * logits[head] for head in kept]).sum(0) / total


def cross_entropy(logits: Tensor, target: int) -> Tensor:
    return logits.exp().sum().log() - logits[target]
