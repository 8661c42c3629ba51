"""Association of experts with the parts of objects and with the attributes of images.

Axes: B images, N = H * W patches in rows from the top left, P parts, A attributes, E experts. Parts are counted as in
GMoE (Li et al., ICLR 2023), figure 3b, attributes as in SF-MoE (Li et al., 2022), figure 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from .association import (
    PermutationTest,
    cramers_v,
    jensen_shannon_distance,
    lift,
    normalized_mutual_information,
    permutation_test,
)

NUM_NEAREST = 9  # patches counted for a part that is a point


class Association(NamedTuple):
    """A table of counts, with statistics of how its rows depend on experts."""

    rows: tuple[str, ...]  # R names
    counts: Tensor  # (R, E)
    shares: Tensor  # (R, E) shares of each row; NaN in an empty row
    lift: Tensor  # (R, E) counts over those expected under independence
    nmi: PermutationTest  # normalized mutual information with its null distribution
    cramers_v: float
    sides: dict[str, float]  # part without its side -> Jensen-Shannon distance between its left and its right row


def patch_centers(grid: tuple[int, int], size: tuple[float, float]) -> Tensor:
    """Centers (N, 2), x and y, of a grid (H, W) of patches over an image of size (height, width)."""
    y, x = ((torch.arange(cells) + 0.5) * (side / cells) for cells, side in zip(grid, size, strict=True))
    return torch.cartesian_prod(y, x).flip(-1).view(-1, 2)


def nearest_patches(points: Tensor, centers: Tensor, number: int = NUM_NEAREST) -> Tensor:
    """Indices of the patches (N, 2) nearest to each point (..., 2), x and y: int64 (..., number), nearest first."""
    squares = (points[..., None, :].double() - centers.double()).square().sum(-1)
    # A stable sort: of equally near patches, the lower index comes first
    return squares.sort(dim=-1, stable=True).indices[..., :number]


def point_members(points: Tensor, visible: Tensor, box: Tensor, centers: Tensor) -> Tensor:
    """Assigns patches to parts that are points, the nearest nine to each, and to the background outside of the box.

    Coordinates are in pixels of the model's input: points (B, P, 2) x and y, boxes (B, 4) left, top, width and height,
    centers (N, 2). The result is bool (B, P + 1, N), the background last. A patch can count for several parts.
    """
    nearest = nearest_patches(points, centers)
    parts = torch.zeros(*nearest.shape[:-1], len(centers), dtype=torch.bool).scatter(-1, nearest, True)
    corner, size = box[:, None, :2], box[:, None, 2:]
    outside = ((centers < corner) | (centers > corner + size)).any(-1)
    return torch.cat([parts & visible[..., None], outside[:, None]], dim=1)


def area_members(part_maps: Tensor, num_parts: int, grid: tuple[int, int]) -> Tensor:
    """Assigns each patch to the part that most of its pixels belong to, the lower index in a tie: bool (B, P, N).

    `part_maps` int64 (B, height, width) hold the part of each pixel. Their sides are multiples of the grid's H and W.
    """
    height, width = part_maps.shape[1:]
    # The mean over a patch of one-hot pixels is the share of each part
    pixels = F.one_hot(part_maps, num_parts).permute(0, 3, 1, 2).float()
    counts = F.avg_pool2d(pixels, (height // grid[0], width // grid[1]))
    return F.one_hot(counts.argmax(1).flatten(1), num_parts).transpose(1, 2).bool()


def count_parts(members: Tensor, first: Tensor, num_experts: int) -> Tensor:
    """Counts the patches of each part by first expert: bool (B, P, N) and int64 (B, N) -> float64 (P, E)."""
    rows = members.transpose(1, 2).flatten(0, 1).double()
    return rows.new_zeros(num_experts, rows.shape[1]).index_add_(0, first.flatten(), rows).T


def associate_parts(
    members: Tensor,
    names: Sequence[str],
    first: Tensor,
    num_experts: int,
    permutations: int,
    seed: int = 0,
    pictures: Sequence[str] | None = None,
) -> Association:
    """Measures how first experts (B, N) depend on parts (B, P, N). The null permutes the patches of each picture.

    `pictures` names the picture that each image shows. Images of one picture share a permutation, because they are
    routed alike and have the same parts. By default every image is a picture of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    counts, shown = count_parts(members, first, num_experts), _numbers(pictures, len(first))
    permuted = (permuted_patches(first, generator, shown) for _ in range(permutations))
    null = normalized_mutual_information(torch.stack([count_parts(members, f, num_experts) for f in permuted]))
    return _association(names, counts, permutation_test(normalized_mutual_information(counts), null))


def permuted_patches(first: Tensor, generator: torch.Generator, shown: Tensor | None = None) -> Tensor:
    """Permutes the patches of each image, alike in images with the same number in `shown` (B,): (B, N) -> (B, N)."""
    order = torch.rand(first.shape, generator=generator).argsort(1)
    return first.gather(1, order if shown is None else order[shown])


def _numbers(pictures: Sequence[str] | None, images: int) -> Tensor:
    """(B,) int64: the number of each image's picture, below B."""
    names = range(images) if pictures is None else pictures
    index_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([index_of[name] for name in names])


def associate_attributes(
    attributes: Tensor,
    names: Sequence[str],
    first: Tensor,
    num_experts: int,
    permutations: int,
    seed: int = 0,
    pictures: Sequence[str] | None = None,
) -> dict[str, Association]:
    """Measures how first experts (B, N) depend on attributes, bool (B, A), for each group of names GROUP::VALUE.

    The table is M = sum over images of a c^T, with attributes a and counts c of first experts. All groups share the
    permutations. The p-values are not corrected for the number of groups. Images of one picture, see
    `associate_parts`, have the same attributes.
    """
    generator = torch.Generator().manual_seed(seed)
    shown = _numbers(pictures, len(first))
    positions = np.unique(shown.numpy(), return_index=True)[1].tolist()  # the first image of each picture
    # Images of one picture are no independent observations: their counts are added
    by_image = F.one_hot(first, num_experts).sum(1).double()
    counts = by_image.new_zeros(len(positions), num_experts).index_add_(0, shown, by_image)
    by_picture = attributes[positions].double().T
    table = by_picture @ counts
    # The null permutes pictures: permuting the patches of an image would not change its counts
    orders = [torch.randperm(len(counts), generator=generator) for _ in range(permutations)]
    null_tables = torch.stack([by_picture @ counts[order] for order in orders])
    associations = {}
    for group, rows in grouped(names).items():
        null = normalized_mutual_information(null_tables[:, rows])
        test = permutation_test(normalized_mutual_information(table[rows]), null)
        values = [names[row].partition("::")[2] or names[row] for row in rows]
        associations[group] = _association(values, table[rows], test)
    return associations


def grouped(names: Sequence[str]) -> dict[str, list[int]]:
    """Indices of attributes by the part of their name before "::"."""
    groups = [name.partition("::")[0] for name in names]
    return {group: [index for index, other in enumerate(groups) if other == group] for group in groups}


def sides(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Indices of paired parts: "left wing" and "right wing" give "wing"."""
    index_of = {name: index for index, name in enumerate(names)}
    pairs = [(name, name.replace("left ", "right ", 1)) for name in names if name.startswith("left ")]
    return {left.removeprefix("left "): (index_of[left], index_of[right]) for left, right in pairs if right in index_of}


def _association(names: Sequence[str], counts: Tensor, test: PermutationTest) -> Association:
    if not counts.sum():
        remedy = "no patch of the images belongs to any of them; give images with annotated parts"
        raise ArgumentError.of("parts", list(names), remedy)
    pairs = sides(names)
    distances = {name: jensen_shannon_distance(counts[left], counts[right]) for name, (left, right) in pairs.items()}
    shares = counts.double() / counts.double().sum(-1, keepdim=True)
    return Association(tuple(names), counts, shares, lift(counts), test, cramers_v(counts), distances)
