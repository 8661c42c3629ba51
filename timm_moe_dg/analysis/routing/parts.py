"""Which patches lie on which part of an object, and how experts share out parts and attributes.

Axes: B images, N = H * W patches in rows from the top left, P parts, A attributes, E experts. Counts of parts are those
of GMoE (Li et al., ICLR 2023), figure 3b; counts of attributes those of SF-MoE (Li et al., 2022), figure 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from .association import (
    PermutationTest,
    compared_with_null,
    cramers_v,
    jensen_shannon_distance,
    lift,
    normalized_mutual_information,
    permutation_test,
    row_shares,
)

NEAREST = 9  # patches counted for a part that is a point


class Association(NamedTuple):
    """How a table of counts ties its rows to experts.

    Attributes:
        rows: Names of the R rows.
        counts: (R, E).
        shares: (R, E) of each row; NaN in an empty one.
        lift: (R, E) counts over those of independence.
        nmi: Normalized mutual information, with its null distribution.
        cramers_v: Cramer's V.
        sides: Name of a part without its side -> Jensen-Shannon distance of its left and right row.
    """

    rows: tuple[str, ...]
    counts: Tensor
    shares: Tensor
    lift: Tensor
    nmi: PermutationTest
    cramers_v: float
    sides: dict[str, float]


def patch_centers(grid: tuple[int, int], size: tuple[float, float]) -> Tensor:
    """(N, 2) x and y of the centers of a grid (H, W) of patches over an image of size (height, width)."""
    y, x = ((torch.arange(cells) + 0.5) * (side / cells) for cells, side in zip(grid, size, strict=True))
    return torch.cartesian_prod(y, x).flip(-1).view(-1, 2)


def nearest_patches(points: Tensor, centers: Tensor, number: int = NEAREST) -> Tensor:
    """The patches whose centers are nearest to each point, ties to the lower index.

    Args:
        points: (..., 2) x and y.
        centers: (N, 2).
        number: How many.

    Returns:
        int64 (..., number), nearest first.
    """
    squares = (points[..., None, :].double() - centers.double()).square().sum(-1)
    return squares.sort(dim=-1, stable=True).indices[..., :number]


def point_members(points: Tensor, visible: Tensor, box: Tensor, centers: Tensor) -> Tensor:
    """Which patches count for parts that are points: the nearest nine; and which are background, outside the box.

    Args:
        points: (B, P, 2) x and y, in pixels of the model's input.
        visible: bool (B, P).
        box: (B, 4) left, top, width, height, likewise.
        centers: (N, 2).

    Returns:
        bool (B, P + 1, N), the background last. A patch can count for several parts.
    """
    near = nearest_patches(points, centers)
    parts = torch.zeros(*near.shape[:-1], len(centers), dtype=torch.bool).scatter(-1, near, True)
    corner, size = box[:, None, :2], box[:, None, 2:]
    outside = ((centers < corner) | (centers > corner + size)).any(-1)
    return torch.cat([parts & visible[..., None], outside[:, None]], dim=1)


def area_members(part_maps: Tensor, num_parts: int, grid: tuple[int, int]) -> Tensor:
    """Which patches count for parts that are areas: each for the part that most of its pixels belong to.

    Args:
        part_maps: int64 (B, height, width), the part of each pixel; the sides are multiples of the grid's.
        num_parts: P.
        grid: H and W.

    Returns:
        bool (B, P, N); exactly one part for each patch, the lower index in a tie.
    """
    height, width = part_maps.shape[1:]
    pixels = F.one_hot(part_maps, num_parts).permute(0, 3, 1, 2).float()
    counts = F.avg_pool2d(pixels, (height // grid[0], width // grid[1]))
    return F.one_hot(counts.argmax(1).flatten(1), num_parts).transpose(1, 2).bool()


def count_parts(members: Tensor, first: Tensor, num_experts: int) -> Tensor:
    """Counts the patches of each part by their first expert.

    Args:
        members: (B, P, N) whether a patch counts for a part.
        first: int64 (B, N).
        num_experts: E.

    Returns:
        float64 (P, E).
    """
    rows = members.transpose(1, 2).flatten(0, 1).double()
    return rows.new_zeros(num_experts, rows.shape[1]).index_add_(0, first.flatten(), rows).T


def associate_parts(
    members: Tensor, names: Sequence[str], first: Tensor, num_experts: int, permutations: int, seed: int = 0
) -> Association:
    """Ties parts to experts; the null exchanges the experts of an image's patches among themselves.

    Args:
        members: (B, P, N), see `point_members` and `area_members`.
        names: P names.
        first: int64 (B, N) first expert of each patch.
        num_experts: E.
        permutations: Draws of the null.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = count_parts(members, first, num_experts)

    def draw() -> Tensor:
        return normalized_mutual_information(count_parts(members, permuted_patches(first, generator), num_experts))

    test = permutation_test(normalized_mutual_information(counts), draw, permutations)
    return _association(names, counts, test)


def permuted_patches(first: Tensor, generator: torch.Generator) -> Tensor:
    """Exchanges the patches of each image among themselves: (B, N) -> (B, N)."""
    return first.gather(1, torch.rand(first.shape, generator=generator).argsort(1))


def associate_attributes(
    attributes: Tensor, names: Sequence[str], first: Tensor, num_experts: int, permutations: int, seed: int = 0
) -> dict[str, Association]:
    """Ties the attributes of whole images to experts, group by group.

    M = sum over images of a c^T, with attributes a and counts c of first choices. Exchanging an image's patches would
    leave M as it is, so the null exchanges the images' attributes. The groups' p are not corrected for their number.

    Args:
        attributes: bool (B, A).
        names: A names, GROUP::VALUE.
        first: int64 (B, N).
        num_experts: E.
        permutations: Draws of the null, the same for all groups.
        seed: Of the draws.

    Returns:
        Group -> its association, in the order of the names.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = F.one_hot(first, num_experts).sum(1).double()
    held = attributes.double().T
    table = held @ counts
    drawn = torch.stack([held @ counts[torch.randperm(len(counts), generator=generator)] for _ in range(permutations)])
    found = {}
    for group, rows in grouped(names).items():
        observed = normalized_mutual_information(table[rows])
        test = compared_with_null(observed, normalized_mutual_information(drawn[:, rows]))
        values = [names[row].partition("::")[2] or names[row] for row in rows]
        found[group] = _association(values, table[rows], test)
    return found


def grouped(names: Sequence[str]) -> dict[str, list[int]]:
    """Positions of attributes by the part of their name in front of "::"."""
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        groups.setdefault(name.partition("::")[0], []).append(position)
    return groups


def sides(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Positions of parts that are there twice: "left wing" and "right wing" give "wing"."""
    at = {name: position for position, name in enumerate(names)}
    plain = [name.removeprefix("left ") for name in names if name.startswith("left ")]
    return {name: (at[f"left {name}"], at[f"right {name}"]) for name in plain if f"right {name}" in at}


def _association(names: Sequence[str], counts: Tensor, test: PermutationTest) -> Association:
    if not counts.sum():
        raise ArgumentError.of("parts", list(names), "no patch of the images belongs to any of them")
    distances = {
        name: float(jensen_shannon_distance(counts[left], counts[right]))
        for name, (left, right) in sides(names).items()
    }
    return Association(
        tuple(names), counts, row_shares(counts), lift(counts), test, float(cramers_v(counts)), distances
    )
