"""Whether the same patch of the same picture goes to the same expert in another domain.

GMoE (Li et al., ICLR 2023) claims that experts process visual attributes independently of the domain. The papers give
no figure for the claim; these statistics were designed for this package.

Axes: B pictures that two domains share, N patches.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DataError
from .association import PermutationTest, permutation_test
from .parts import patch_centers, permuted_patches


class PairInvariance(NamedTuple):
    """Agreement between two domains."""

    domains: tuple[str, str]
    pictures: int  # B
    patches: int  # compared in each picture, without those that a rotation moves out of the image
    agreement: PermutationTest  # share of patches with the same expert; the null permutes the patches of each picture
    kappa: float  # Cohen's kappa of the agreement: 0 for chance, 1 for the same expert everywhere
    # Agreement of each picture with the next one in the other domain, NaN with one picture. It measures what the place
    # in the image explains alone, such as a border that is always background.
    other_pictures: float


def rotated_patches(grid: tuple[int, int], degrees: float) -> Tensor:
    """The nearest patch of each upright patch after a rotation about the center: int64 (N,); -1 outside of the image.

    `degrees` are counter-clockwise, and the patches of the grid H x W are square.
    """
    height, width = grid
    x, y = (patch_centers(grid, grid).double() - torch.tensor([width / 2, height / 2])).T
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # 1e-9: a rotation by 90 degrees hits the centers despite rounding errors
    column = ((x * cosine + y * sine) + width / 2 + 1e-9).floor().long()
    row = ((y * cosine - x * sine) + height / 2 + 1e-9).floor().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, -1)


def cohens_kappa(first: Tensor, second: Tensor) -> float:
    """Cohen's kappa of two int64 tensors of one shape; NaN if all entries of both are the same."""
    from sklearn.metrics import cohen_kappa_score

    if len(torch.cat([first, second]).unique()) < 2:  # chance already agrees everywhere
        return math.nan
    return float(cohen_kappa_score(first.flatten(), second.flatten()))


def pair_invariance(names: tuple[str, str], first: Tensor, second: Tensor, permutations: int) -> PairInvariance:
    """Compares the experts of the same patches of the same pictures in two domains, int64 (B, N) each."""
    generator = torch.Generator().manual_seed(0)
    null = [(first == permuted_patches(second, generator)).double().mean() for _ in range(permutations)]
    test = permutation_test((first == second).double().mean(), torch.stack(null))
    others = float((first == second.roll(1, 0)).double().mean()) if len(first) > 1 else math.nan
    return PairInvariance(names, len(first), first.shape[1], test, cohens_kappa(first, second), others)


def routing_invariance(
    experts: Mapping[str, Tensor],
    pictures: Mapping[str, Sequence[str]],
    angles: Mapping[str, float],
    permutations: int = 199,
) -> list[PairInvariance]:
    """Compares every two domains that share pictures: `experts` int64 (B, H, W), `pictures` B names by domain.

    `angles` are degrees by which a domain's pictures are rotated counter-clockwise, 0 if missing.
    """
    check_paired(pictures)
    pairs = []
    for names in combinations(experts, 2):
        positions = [{picture: index for index, picture in enumerate(pictures[domain])} for domain in names]
        shared = [picture for picture in positions[0] if picture in positions[1]]
        if shared:
            rows = [[index_of[picture] for picture in shared] for index_of in positions]
            grids = [experts[domain][indices] for domain, indices in zip(names, rows, strict=True)]
            # The patches that both domains show, with rotations undone
            shape = (grids[0].shape[1], grids[0].shape[2])
            indices = [rotated_patches(shape, angles.get(domain, 0.0)) for domain in names]
            in_both = (indices[0] >= 0) & (indices[1] >= 0)
            first, second = (grid.flatten(1)[:, at[in_both]] for grid, at in zip(grids, indices, strict=True))
            pairs.append(pair_invariance(names, first, second, permutations))
    return pairs


def check_paired(pictures: Mapping[str, Sequence[str]]) -> None:
    """Checks that two domains share a picture, from the names of each domain's pictures."""
    counts = Counter(name for names in pictures.values() for name in set(names))
    if max(counts.values(), default=0) < 2:
        remedy = "no two domains are known to hold the same pictures; if files with the same CLASS/IMAGE show the same "
        remedy += "photograph in all domains, add --split-by-photograph"
        raise DataError(f"domains={list(pictures)!r}: {remedy}")


def overall(pairs: Sequence[PairInvariance]) -> PermutationTest:
    """The mean agreement of all pairs, against the mean of their nulls."""
    value = torch.tensor([pair.agreement.value for pair in pairs], dtype=torch.float64).mean()
    return permutation_test(value, torch.stack([pair.agreement.null for pair in pairs]).mean(0))
