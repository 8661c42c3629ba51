"""Association of a run's experts with parts and attributes, and their invariance to domains: numbers and pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data import Domain
from ...errors import ArgumentError
from ...layers import GeoMoeMlp
from ...protocols.run_identity import sha256
from ...storage.files import json_text
from ..run_view import RunView
from .annotations import annotate
from .association import PermutationTest
from .chosen_images import picture_names
from .invariance import PairInvariance, check_paired, overall, routing_invariance
from .map_plots import plot_association, plot_nulls
from .maps import RoutingMap, chosen_block, mixture_blocks, routing_maps_of
from .parts import Association, associate_attributes, associate_parts

PARTS = "parts"  # a key of the results; all other keys are groups of attributes
ALL_PAIRS = "all pairs"
COUNTED = ("counts", "shares", "lift")  # tables of an association
UNTRAINED = "untrained_router"  # folder of the results of routers that were initialized again


def draw_attributes(
    view: RunView,
    figures: Path,
    *,
    cub: Path | None,
    block: int | None,
    max_images: int | None,
    permutations: int,
) -> dict[str, Association]:
    """Draws parts.png and attributes.png, and writes the associations that it returns to attributes.json."""
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
    plot_association(associations[PARTS], "parts against experts, patches of all domains", figures / "parts.png")
    groups = {name: association for name, association in associations.items() if name != PARTS}
    if groups:
        # NaN: no image has an attribute of the group
        strongest = max(groups, key=lambda name: np.nan_to_num(groups[name].nmi.value, nan=-1.0))
        title = f"attributes of images against experts; numbers of {strongest}"
        rows = tuple(f"{name}: {value}" for name, table in groups.items() for value in table.rows)
        counts, shares, lifts = (torch.cat([getattr(table, key) for table in groups.values()]) for key in COUNTED)
        joined = groups[strongest]._replace(rows=rows, counts=counts, shares=shares, lift=lifts)
        plot_association(joined, title, figures / "attributes.png")
    else:  # of an earlier call with other annotations
        (figures / "attributes.png").unlink(missing_ok=True)
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
    angles: Sequence[tuple[str, Any]],
) -> tuple[list[PairInvariance], PermutationTest]:
    """Draws invariance.png, and writes to invariance.json the agreement of domains and its mean, which it returns.

    The picture also has the agreement of an untrained router, if an invariance.json of it lies in untrained_router/.
    `angles` are pairs of a domain and its pictures' counter-clockwise rotation in degrees, which override the data's.
    """
    block = _patch_block(view, block)
    domains = view.domains
    rotations = {domain.name: domain.angle for domain in domains}
    for name, angle in angles:
        if name not in rotations or isinstance(angle, bool) or not isinstance(angle, int | float):
            remedy = f"give DOMAIN=DEGREES for domains out of: {', '.join(rotations)}"
            raise ArgumentError.of("angles", f"{name}={angle}", remedy)
    rotations |= dict(angles)
    names = [picture_names(domain, view.shares_photographs) for domain in domains]
    with_names = [(domain, rows[:max_images]) for domain, rows in zip(domains, names, strict=True) if rows]
    pictures = {domain.name: rows for domain, rows in with_names}
    check_paired(pictures)  # before images are routed, which takes minutes
    experts = {domain.name: _route(view, domain, range(len(rows)), block).first for domain, rows in with_names}
    pairs = routing_invariance(experts, pictures, rotations, permutations)
    all_pairs = overall(pairs)
    tests = {ALL_PAIRS: all_pairs, **{" / ".join(pair.domains): pair.agreement for pair in pairs}}
    network = sha256(view.folder / "best" / "model.safetensors")  # an extended run has another one
    compared = {"block": block, "max_images": max_images, "angles": rotations, "network_sha256": network}
    baseline = _agreements(figures / UNTRAINED / "invariance.json", compared)
    plot_nulls(tests, "patches with the same first expert", figures / "invariance.png", baseline)
    numbers = {
        **{"model": view.name, "permutations": permutations, **compared},
        "all_pairs": _test(all_pairs),
        "pairs": [{**pair._asdict(), "agreement": _test(pair.agreement)} for pair in pairs],
    }
    (figures / "invariance.json").write_text(json_text(numbers, indent=1))
    return pairs, all_pairs


def _agreements(path: Path, compared: Mapping[str, object]) -> dict[str, float]:
    """Agreement by name of the pair in an earlier result of the same options; empty if there is none."""
    numbers = json.loads(path.read_text()) if path.is_file() else {}
    if any(name not in numbers or numbers[name] != value for name, value in compared.items()):
        return {}
    pairs = {" / ".join(pair["domains"]): pair["agreement"]["value"] for pair in numbers["pairs"]}
    return {ALL_PAIRS: numbers["all_pairs"]["value"], **pairs}


def _patch_block(view: RunView, block: int | None) -> int:
    """The index of the block to analyze, in a model that routes patches."""
    blocks = mixture_blocks(view.model)
    block = chosen_block(blocks, block)
    if any(isinstance(layer, GeoMoeMlp) for layer in blocks.values()):
        remedy = "routes whole images by where they were taken; use the command domains"
        raise ArgumentError.of("model", view.name, remedy)
    return block


def _route(view: RunView, domain: Domain, positions: Sequence[int], block: int) -> RoutingMap:
    images = ((domain.pixels(position), view.metadata(domain, position)) for position in positions)
    return routing_maps_of(view.model, view.batches(images))[block]


def _table(association: Association) -> dict[str, object]:
    tables = {name: getattr(association, name).tolist() for name in COUNTED}
    scores = {"cramers_v": association.cramers_v, "left_right_distance": association.sides}
    return {"rows": list(association.rows), **tables, "nmi": _test(association.nmi), **scores}


def _test(test: PermutationTest) -> dict[str, object]:
    null = {"mean": float(test.null.mean()), "largest": float(test.null.max()), "draws": len(test.null)}
    return {"value": test.value, "null": null, "p": test.p}
