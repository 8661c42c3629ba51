"""Whether the same patch of the same picture goes to the same expert in another domain.

Axes: B pictures that two domains share, N patches. GMoE (Li et al., ICLR 2023) claims that experts handle visual
attributes whatever the domain; the papers give no number for it, this is ours.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DataError
from .association import PermutationTest, compared_with_null
from .parts import patch_centers, permuted_patches


class PairInvariance(NamedTuple):
    """Agreement between two domains.

    Attributes:
        domains: Their names.
        pictures: B.
        patches: Compared patches of a picture; those that a rotation moves out of the image are not.
        agreement: Share of patches that go to the same expert; the null exchanges the patches of each picture.
        kappa: Cohen's kappa of the agreement: 0 for chance, 1 for the same expert everywhere.
        other_pictures: Agreement of each picture with the next one of the other domain at the same place: what the
            place alone, such as a border that is always background, is worth. NaN with one picture.
    """

    domains: tuple[str, str]
    pictures: int
    patches: int
    agreement: PermutationTest
    kappa: float
    other_pictures: float


def rotated_patches(grid: tuple[int, int], degrees: float) -> Tensor:
    """Where each patch of an upright image is found in the image turned about its middle.

    Args:
        grid: H and W, in square patches.
        degrees: Counter-clockwise.

    Returns:
        int64 (N,): index of the nearest patch of the turned image; -1 for centers that are turned out of it.
    """
    height, width = grid
    x, y = (patch_centers(grid, grid).double() - torch.tensor([width / 2, height / 2])).T
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # 1e-9: a quarter turn must not fall beside a center by rounding
    column = ((x * cosine + y * sine) + width / 2 + 1e-9).floor().long()
    row = ((y * cosine - x * sine) + height / 2 + 1e-9).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, -1)


def cohens_kappa(first: Tensor, second: Tensor, num_experts: int) -> float:
    """Cohen's kappa of two int64 tensors of one shape; NaN where chance already agrees everywhere."""
    pairs = first.flatten() * num_experts + second.flatten()
    joint = torch.bincount(pairs, minlength=num_experts**2).view(num_experts, num_experts).double() / len(pairs)
    expected = float(joint.sum(0) @ joint.sum(1))
    return float((joint.trace() - expected) / (1 - expected)) if expected < 1 else math.nan


def pair_invariance(
    names: tuple[str, str], first: Tensor, second: Tensor, num_experts: int, permutations: int, seed: int = 0
) -> PairInvariance:
    """Compares corresponding patches of the same pictures.

    Args:
        names: Of the two domains.
        first: int64 (B, N) experts in one domain.
        second: int64 (B, N) experts of the same pictures and patches in the other.
        num_experts: E.
        permutations: Draws of the null.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [(first == permuted_patches(second, generator)).double().mean() for _ in range(permutations)]
    test = compared_with_null((first == second).double().mean(), torch.stack(draws))
    kappa = cohens_kappa(first, second, num_experts)
    others = float((first == second.roll(1, 0)).double().mean()) if len(first) > 1 else math.nan
    return PairInvariance(names, len(first), first.shape[1], test, kappa, others)


def routing_invariance(
    experts: Mapping[str, Tensor],
    pictures: Mapping[str, Sequence[str]],
    angles: Mapping[str, float],
    num_experts: int,
    permutations: int = 199,
) -> list[PairInvariance]:
    """Compares every two domains that share pictures.

    Args:
        experts: Domain -> int64 (B, H, W), the first expert of every patch.
        pictures: Domain -> names of the pictures, B of them, in the same order.
        angles: Domain -> degrees by which its pictures are turned counter-clockwise; 0 where there is none.
        num_experts: E.
        permutations: Draws of the null of each pair.

    Raises:
        DataError: No two domains share a picture.
    """
    check_paired(pictures)
    found = []
    for names in combinations(experts, 2):
        positions = [{name: position for position, name in enumerate(pictures[domain])} for domain in names]
        shared = [name for name in positions[0] if name in positions[1]]
        if shared:
            grids = [
                experts[domain][[at[name] for name in shared]] for domain, at in zip(names, positions, strict=True)
            ]
            upright = _upright(grids, [angles.get(domain, 0.0) for domain in names])
            found.append(pair_invariance(names, upright[0], upright[1], num_experts, permutations))
    return found


def check_paired(pictures: Mapping[str, Sequence[str]]) -> None:
    """Makes sure that there is something to compare.

    Args:
        pictures: Domain -> names of its pictures.

    Raises:
        DataError: No two domains share a picture.
    """
    held = Counter(name for names in pictures.values() for name in set(names))
    if max(held.values(), default=0) < 2:
        remedy = "no two domains hold the same picture under the same name (CLASS/IMAGE): there is nothing to compare"
        raise DataError(f"domains={list(pictures)!r}: {remedy}")


def overall(pairs: Sequence[PairInvariance]) -> PermutationTest:
    """The mean agreement of all pairs, against the mean of their nulls."""
    value = torch.tensor([pair.agreement.value for pair in pairs], dtype=torch.float64).mean()
    return compared_with_null(value, torch.stack([pair.agreement.null for pair in pairs]).mean(0))


def _upright(grids: Sequence[Tensor], angles: Sequence[float]) -> list[Tensor]:
    """The patches (B, N) that both domains show, rotations undone."""
    shape = (grids[0].shape[1], grids[0].shape[2])
    places = [rotated_patches(shape, angle) for angle in angles]
    both = (places[0] >= 0) & (places[1] >= 0)
    return [grid.flatten(1)[:, place[both]] for grid, place in zip(grids, places, strict=True)]
