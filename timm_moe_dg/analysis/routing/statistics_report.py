"""Experts against parts, attributes and domains of a run: numbers, and pictures of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...data import Domain
from ...errors import ArgumentError
from ...storage.json_text import json_text
from ..run_view import RunView
from .annotations import annotated
from .association import PermutationTest
from .chosen_images import picture_names
from .invariance import PairInvariance, check_paired, overall, routing_invariance
from .map_plots import plot_association, plot_nulls
from .maps import RoutingMap, chosen_block, mixture_blocks, routes_patches, routing_maps_of
from .parts import Association, associate_attributes, associate_parts

PARTS = "parts"  # the row of the results that is no group of attributes


def draw_attributes(
    view: RunView,
    figures: Path,
    *,
    data_dir: str | None,
    cub: Path | None,
    block: int | None,
    max_images: int | None,
    permutations: int,
) -> dict[str, Association]:
    """Draws parts.png and attributes.png; attributes.json has the numbers.

    Args:
        view: The run.
        figures: Folder to write to.
        data_dir: Where the data lies now; None for where it lay.
        cub: Folder of CUB-200-2011; None for data that knows its parts itself.
        block: The mixture block to look at; None for the last.
        max_images: Of each domain; None for all.
        permutations: Draws of the nulls.

    Returns:
        The association of parts under `PARTS`, and that of each group of attributes under its name.

    Raises:
        ArgumentError: The model has no experts or routes whole images; the data does not know its parts.
        DataError: See `annotated`.
    """
    block = _patch_block(view, block)
    known = annotated(view, view.domains(data_dir), _grid(view), cub, max_images)
    maps = [_routed(view, each.domain, each.positions, block) for each in known]
    first = torch.cat([each.first.flatten(1) for each in maps])
    common = (first, maps[0].num_experts, permutations)
    members = torch.cat([each.members for each in known])
    found = {PARTS: associate_parts(members, known[0].parts, *common)}
    if known[0].attributes is not None:
        attributes = torch.cat([each.attributes for each in known if each.attributes is not None])
        found |= associate_attributes(attributes, known[0].attribute_names, *common)
    plot_association(found[PARTS], "parts against experts, patches of all domains", figures / "parts.png")
    if len(found) > 1:
        strongest = max((name for name in found if name != PARTS), key=lambda name: found[name].nmi.value)
        title = f"attributes of images against experts; numbers of {strongest}"
        plot_association(_stacked(found, strongest), title, figures / "attributes.png")
    numbers = {"model": view.name, "block": block, "images": len(first), "permutations": permutations}
    tables = {name: _table(each) for name, each in found.items()}
    (figures / "attributes.json").write_text(json_text({**numbers, "tables": tables}, indent=1))
    return found


def draw_invariance(
    view: RunView,
    figures: Path,
    *,
    data_dir: str | None,
    block: int | None,
    max_images: int | None,
    permutations: int,
    angles: Sequence[tuple[str, Any]],
) -> tuple[list[PairInvariance], PermutationTest]:
    """Draws invariance.png; invariance.json has the numbers.

    Args:
        view: The run.
        figures: Folder to write to.
        data_dir: Where the data lies now; None for where it lay.
        block: The mixture block to look at; None for the last.
        max_images: Of each domain; None for all.
        permutations: Draws of the nulls.
        angles: Pairs of a domain and the degrees by which its pictures are turned, where the data does not say so.

    Returns:
        Every two domains that share pictures, and the mean of their agreements.

    Raises:
        ArgumentError: The model has no experts or routes whole images; an angle is no number, or of no domain.
        DataError: No two domains share a picture.
    """
    block = _patch_block(view, block)
    domains = view.domains(data_dir)
    turned = {domain.name: domain.angle for domain in domains} | _angles(angles, domains)
    names = {domain.name: picture_names(domain) for domain in domains}
    named = [domain for domain in domains if names[domain.name]]
    pictures = {domain.name: (names[domain.name] or [])[:max_images] for domain in named}
    check_paired(pictures)
    maps = [_routed(view, domain, range(len(pictures[domain.name])), block) for domain in named]
    experts = {domain.name: each.first for domain, each in zip(named, maps, strict=True)}
    found = routing_invariance(experts, pictures, turned, maps[0].num_experts, permutations)
    everything = overall(found)
    tests = {"all pairs": everything, **{" / ".join(pair.domains): pair.agreement for pair in found}}
    plot_nulls(tests, "patches with the same first expert", figures / "invariance.png")
    numbers = {"model": view.name, "block": block, "permutations": permutations, "angles": turned}
    pairs = [{**pair._asdict(), "agreement": _test(pair.agreement)} for pair in found]
    text = json_text({**numbers, "all_pairs": _test(everything), "pairs": pairs}, indent=1)
    (figures / "invariance.json").write_text(text)
    return found, everything


def _patch_block(view: RunView, block: int | None) -> int:
    """The block to look at, in a model that routes patches."""
    block = chosen_block(mixture_blocks(view.model), block)
    if not routes_patches(view.model):
        remedy = "routes whole images by where they were taken, so its patches share an expert; see the command domains"
        raise ArgumentError.of("model", view.name, remedy)
    return block


def _grid(view: RunView) -> tuple[int, int]:
    return view.model.patch_embed.dynamic_feat_size(view.size)


def _routed(view: RunView, domain: Domain, positions: Sequence[int], block: int) -> RoutingMap:
    return routing_maps_of(view.model, view.batches(domain, positions))[block]


def _angles(pairs: Sequence[tuple[str, Any]], domains: Sequence[Domain]) -> dict[str, float]:
    names = [domain.name for domain in domains]
    for name, angle in pairs:
        if name not in names or isinstance(angle, bool) or not isinstance(angle, int | float):
            remedy = f"give DOMAIN=DEGREES for domains out of: {', '.join(names)}"
            raise ArgumentError.of("angles", f"{name}={angle}", remedy)
    return dict(pairs)


def _stacked(found: Mapping[str, Association], strongest: str) -> Association:
    """The tables of all groups of attributes one above the other, for drawing, with the numbers of one of them."""
    groups = [(name, each) for name, each in found.items() if name != PARTS]
    rows = tuple(f"{name}: {value}" for name, each in groups for value in each.rows)
    counts, shares, lifts = (
        torch.cat([getattr(each, field) for _, each in groups]) for field in ("counts", "shares", "lift")
    )
    return Association(rows, counts, shares, lifts, found[strongest].nmi, found[strongest].cramers_v, {})


def _table(found: Association) -> dict[str, object]:
    tables = {name: getattr(found, name).tolist() for name in ("counts", "shares", "lift")}
    scores = {"nmi": _test(found.nmi), "cramers_v": found.cramers_v, "left_right_distance": found.sides}
    return {"rows": list(found.rows), **tables, **scores}


def _test(test: PermutationTest) -> dict[str, object]:
    null = {"mean": float(test.null.mean()), "largest": float(test.null.max()), "draws": len(test.null)}
    return {"value": test.value, "null": null, "p": test.p}
