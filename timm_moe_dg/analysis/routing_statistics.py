"""Statistics of routing: how experts depend on parts of objects and attributes of images, and how they agree by domain.

Parts are counted as in GMoE (Li et al., ICLR 2023), figure 3b, and attributes as in SF-MoE (Li et al., 2022), figure 5.
GMoE claims that experts process visual attributes independently of the domain. The papers give no figure for the claim,
and the statistics of agreement were designed for this package. Pictures and JSON of a run's statistics come last.

Axes: B images, N = H * W patches in rows from the top left, P parts, A attributes, E experts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Domain
from ..errors import ArgumentError, DataError
from ..layers import GeoMoeMlp
from ..storage.files import json_text
from .annotations import annotate, patch_centers
from .maps import RoutingMap, chosen_block, mixture_blocks, routing_maps
from .plots import plot_associations, plot_nulls
from .run_view import RunView, picture_names

PARTS = "parts"  # a key of the results; all other keys are groups of attributes
COUNTED = ("counts", "shares", "lift")  # tables of an association
UNTRAINED = "untrained_router"  # folder of the results of routers that were initialized again


class PermutationTest(NamedTuple):
    """A statistic and its null distribution."""

    value: float  # observed
    null: Tensor  # values under random exchanges
    p: float  # (1 + number of null values >= the observed one) / (1 + number of null values); NaN for a NaN value


class Association(NamedTuple):
    """A table of counts, with statistics of how its R rows depend on experts."""

    rows: tuple[str, ...]  # R names
    counts: Tensor  # (R, E)
    shares: Tensor  # (R, E) shares of each row; NaN in an empty row
    lift: Tensor  # (R, E) counts over those expected under independence
    nmi: PermutationTest  # normalized mutual information with its null distribution
    cramers_v: float


class PairInvariance(NamedTuple):
    """Agreement between two domains."""

    domains: tuple[str, str]
    pictures: int  # that both domains have
    patches: int  # compared in each picture, without those that a rotation moves out of the image
    agreement: PermutationTest  # share of patches with the same expert; the null permutes the patches of each picture
    kappa: float  # Cohen's kappa of the agreement: 0 for chance, 1 for the same expert everywhere
    # Agreement of each picture with the next one in the other domain, NaN with one picture. It measures what the place
    # in the image explains alone, such as a border that is always background.
    other_pictures: float


def permutation_test(value: Tensor, null: Tensor) -> PermutationTest:
    """Tests whether a scalar statistic is larger than its values under the null hypothesis."""
    null = null.double()
    # The tolerance keeps ties: the same terms summed in another order differ in the last bits
    reached = int((null >= value.double() - 1e-12).sum())
    p = math.nan if value.isnan() else (1 + reached) / (1 + len(null))
    return PermutationTest(float(value), null, p)


def lift(counts: Tensor) -> Tensor:
    """Counts over those expected under independence: (R, E) float64; NaN in empty rows and columns."""
    from scipy.stats.contingency import expected_freq

    return counts.double() / torch.from_numpy(expected_freq(counts.numpy()))


def cramers_v(counts: Tensor) -> float:
    """sqrt(chi2 / (n min(R - 1, E - 1))) of (R, E) counts without their empty rows and columns, 0 to 1.

    There is no bias correction. With fewer than two rows or columns the result is NaN.
    """
    from scipy.stats.contingency import association

    table = counts.long()
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    return float(association(table.numpy(), method="cramer")) if min(table.shape) > 1 else math.nan


def normalized_mutual_information(counts: Tensor) -> Tensor:
    """Mutual information of rows and columns over the mean of both entropies: (..., R, E) counts -> float64 (...).

    0 for independence, 1 for a one-to-one relation or a single cell, NaN for an empty table.
    """
    # scikit-learn's function takes the labels of one table, and a permutation test has many tables
    joint = counts.double() / counts.double().sum((-2, -1), keepdim=True)
    parts = (joint.sum(-1), joint.sum(-2), joint.flatten(-2))
    rows, columns, cells = (torch.special.entr(shares).sum(-1) for shares in parts)
    ratio = (2 * (rows + columns - cells) / (rows + columns)).clamp(0.0, 1.0)
    # A table with one row and one column has no entropy: 0 / 0
    return ratio.where(rows + columns > 0, torch.where(cells.isnan(), cells, 1.0))


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
    pictures: Sequence[str] | None = None,
) -> Association:
    """Measures how first experts (B, N) depend on parts (B, P, N). The null permutes the patches of each picture.

    `pictures` names the picture that each image shows. Images of one picture share a permutation, because they are
    routed alike and have the same parts. By default every image is a picture of its own.
    """
    generator = torch.Generator().manual_seed(0)
    counts, shown = count_parts(members, first, num_experts), _numbers(pictures, len(first))
    permuted = (permuted_patches(first, generator, shown) for _ in range(permutations))
    null = normalized_mutual_information(torch.stack([count_parts(members, f, num_experts) for f in permuted]))
    return _association(names, counts, null)


def associate_attributes(
    attributes: Tensor,
    names: Sequence[str],
    first: Tensor,
    num_experts: int,
    permutations: int,
    pictures: Sequence[str] | None = None,
) -> dict[str, Association]:
    """Measures how first experts (B, N) depend on attributes, bool (B, A), for each group of names GROUP::VALUE.

    The table is M = sum over images of a c^T, with attributes a and counts c of first experts. All groups share the
    permutations. The p-values are not corrected for the number of groups. Images of one picture, see
    `associate_parts`, have the same attributes.
    """
    generator = torch.Generator().manual_seed(0)
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
    associations, groups = {}, [name.partition("::")[0] for name in names]
    for group in dict.fromkeys(groups):
        rows = [index for index, other in enumerate(groups) if other == group]
        values = [names[row].partition("::")[2] or names[row] for row in rows]
        associations[group] = _association(values, table[rows], normalized_mutual_information(null_tables[:, rows]))
    return associations


def _association(names: Sequence[str], counts: Tensor, null: Tensor) -> Association:
    if not counts.sum():
        remedy = "no patch of the images belongs to any of them; give images with annotated parts"
        raise ArgumentError.of("parts", list(names), remedy)
    shares = counts.double() / counts.double().sum(-1, keepdim=True)
    test = permutation_test(normalized_mutual_information(counts), null)
    return Association(tuple(names), counts, shares, lift(counts), test, cramers_v(counts))


def _numbers(pictures: Sequence[str] | None, images: int) -> Tensor:
    """(B,) int64: the number of each image's picture, below B."""
    names = range(images) if pictures is None else pictures
    index_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([index_of[name] for name in names])


def permuted_patches(first: Tensor, generator: torch.Generator, shown: Tensor) -> Tensor:
    """Permutes the patches of each image, alike in images with the same number in `shown` (B,): (B, N) -> (B, N)."""
    return first.gather(1, torch.rand(first.shape, generator=generator).argsort(1)[shown])


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
    generator, apart = torch.Generator().manual_seed(0), torch.arange(len(first))
    null = [(first == permuted_patches(second, generator, apart)).double().mean() for _ in range(permutations)]
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


def draw_attributes(
    view: RunView,
    figures: Path,
    *,
    cub: Path | None,
    block: int | None,
    max_images: int | None,
    permutations: int,
) -> dict[str, Association]:
    """Draws parts.png and, if there are any, attributes.png. Writes what it returns to attributes.json."""
    block = _patch_block(view, block)
    grid = view.model.patch_embed.dynamic_feat_size(view.size)
    annotated = annotate(view, [range(len(domain))[:max_images] for domain in view.domains], grid, cub)
    maps = [_route(view, part.domain, part.positions, block) for part in annotated]
    first = torch.cat([domain_map.first.flatten(1) for domain_map in maps])
    routing: dict[str, Any] = {"first": first, "num_experts": maps[0].num_experts, "permutations": permutations}
    routing["pictures"] = [name for part in annotated for name in part.pictures]
    members = torch.cat([part.members for part in annotated])
    associations = {PARTS: associate_parts(members, annotated[0].parts, **routing)}
    if annotated[0].attributes is not None:
        attributes = torch.cat([part.attributes for part in annotated if part.attributes is not None])
        associations |= associate_attributes(attributes, annotated[0].attribute_names, **routing)
    plot_associations({"": associations[PARTS]}, figures / "parts.png")
    if groups := {name: association for name, association in associations.items() if name != PARTS}:
        plot_associations(groups, figures / "attributes.png")
    numbers = {"model": view.name, "block": block, "images": len(first), "permutations": permutations}
    tables = {name: _table(association) for name, association in associations.items()}
    (figures / "attributes.json").write_text(json_text({**numbers, "tables": tables}, indent=1))
    return associations


def draw_invariance(
    view: RunView,
    figures: Path,
    *,
    block: int | None,
    max_images: int | None,
    permutations: int,
) -> tuple[list[PairInvariance], PermutationTest]:
    """Draws invariance.png, and writes to invariance.json the agreement of domains and its mean, which it returns."""
    block = _patch_block(view, block)
    domains = view.domains
    angles = {domain.name: domain.angle for domain in domains}
    names = [picture_names(domain, view.shares_photographs) for domain in domains]
    with_names = [(domain, rows[:max_images]) for domain, rows in zip(domains, names, strict=True) if rows]
    pictures = {domain.name: rows for domain, rows in with_names}
    check_paired(pictures)  # before images are routed, which takes minutes
    experts = {domain.name: _route(view, domain, range(len(rows)), block).first for domain, rows in with_names}
    pairs = routing_invariance(experts, pictures, angles, permutations)
    all_pairs = overall(pairs)
    tests = {"all pairs": all_pairs, **{" / ".join(pair.domains): pair.agreement for pair in pairs}}
    plot_nulls(tests, "patches with the same first expert", figures / "invariance.png")
    numbers = {
        **{"model": view.name, "block": block, "max_images": max_images, "permutations": permutations},
        "angles": angles,
        "all_pairs": _test(all_pairs),
        "pairs": [{**pair._asdict(), "agreement": _test(pair.agreement)} for pair in pairs],
    }
    (figures / "invariance.json").write_text(json_text(numbers, indent=1))
    return pairs, all_pairs


def _patch_block(view: RunView, block: int | None) -> int:
    """The index of the block to analyze, in a model that routes patches."""
    block = chosen_block(view.model, block)
    if isinstance(mixture_blocks(view.model)[block], GeoMoeMlp):
        remedy = "routes whole images by where they were taken; use the command domains"
        raise ArgumentError.of("model", view.name, remedy)
    return block


def _route(view: RunView, domain: Domain, positions: Sequence[int], block: int) -> RoutingMap:
    images = ((domain.pixels(position), view.metadata(domain, position)) for position in positions)
    return routing_maps(view.model, view.batches(images))[block]


def _table(association: Association) -> dict[str, object]:
    tables = {name: getattr(association, name).tolist() for name in COUNTED}
    scores = {"nmi": _test(association.nmi), "cramers_v": association.cramers_v}
    return {"rows": list(association.rows), **tables, **scores}


def _test(test: PermutationTest) -> dict[str, object]:
    null = {"mean": float(test.null.mean()), "largest": float(test.null.max()), "draws": len(test.null)}
    return {"value": test.value, "null": null, "p": test.p}
