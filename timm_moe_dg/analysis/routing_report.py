"""Statistics of a run's routing as pictures and JSON: experts by part and attribute, and their agreement by domain."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..data import Domain
from ..errors import ArgumentError
from ..layers import GeoMoeMlp
from ..storage.files import json_text
from .annotations import annotate
from .maps import RoutingMap, chosen_block, mixture_blocks, routing_maps_of
from .routing_statistics import (
    Association,
    PairInvariance,
    PermutationTest,
    associate_attributes,
    associate_parts,
    check_paired,
    overall,
    routing_invariance,
)
from .run_view import RunView, picture_names
from .style import (
    GRID_DPI,
    LEGEND_BELOW,
    Style,
    category_color,
    fitted,
    line_handle,
    picture,
    text_size,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = "parts"  # a key of the results; all other keys are groups of attributes
COUNTED = ("counts", "shares", "lift")  # tables of an association
UNTRAINED = "untrained_router"  # folder of the results of routers that were initialized again
MAX_LIFT = 8.0  # end of the color scale
MAX_ROWS, MAX_COLUMNS = 40, 16  # of tables with numbers
COLUMN_WIDTH, NUMBER_SIZE = 0.36, 8.0  # inches, and points of a number that fits into them


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
    scores = {"nmi": _test(association.nmi), "cramers_v": association.cramers_v}
    return {"rows": list(association.rows), **tables, **scores}


def _test(test: PermutationTest) -> dict[str, object]:
    null = {"mean": float(test.null.mean()), "largest": float(test.null.max()), "draws": len(test.null)}
    return {"value": test.value, "null": null, "p": test.p}


def plot_associations(groups: Mapping[str, Association], path: Path) -> None:
    """Draws the rows of all groups twice: shares of each row, and lift over independence. Empty rows are hatched."""
    rows = [": ".join(filter(None, (group, row))) for group, table in groups.items() for row in table.rows]
    shares = torch.cat([table.shares for table in groups.values()]).numpy()
    names, bound = [fitted(name, 30) for name in rows], np.log2(MAX_LIFT)
    with np.errstate(divide="ignore"):  # log2(0) is -inf, which is clipped
        log_lift = np.log2(torch.cat([table.lift for table in groups.values()]).numpy()).clip(-bound, bound)
    width = 3.0 + 2 * max(1.4, COLUMN_WIDTH * shares.shape[1])
    height = max(0.28, text_size(width) / 52) * sum(name.count("\n") + 1 for name in names)
    with picture(path, width, 1.6 + height, dpi=GRID_DPI) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_table(left, shares, "share of the row", figure, cmap="cividis", vmin=0, vmax=1)
        _draw_table(right, log_lift, "log2 of the lift", figure, cmap="PuOr_r", vmin=-bound, vmax=bound)
        left.set_yticks(range(len(rows)), names)


def _draw_table(axes: "Axes", values: np.ndarray, label: str, figure: "Figure", **scale: Any) -> None:
    axes.set_facecolor("white")  # the background of masked cells, which are hatched
    axes.patch.set(hatch="///", edgecolor="silver")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **scale)
    if len(values) <= MAX_ROWS and values.shape[1] <= MAX_COLUMNS:
        write_numbers(axes, image, values, size=NUMBER_SIZE)
    steps = range(0, values.shape[1], -(-values.shape[1] // MAX_COLUMNS))
    axes.set_xticks(steps, map(str, steps))
    axes.set_xlabel("expert")
    bar = figure.colorbar(image, ax=axes, orientation="horizontal", aspect=20, fraction=0.05)
    bar.set_label(label)


def plot_nulls(tests: Mapping[str, PermutationTest], label: str, path: Path) -> None:
    """Draws statistics as points on the ranges of their null distributions."""
    names = [fitted(name, 34) for name in tests]
    point: Style = {"marker": "o", "linestyle": "", "color": category_color(1), "markersize": 6}
    with picture(path, 6.0, 1.9 + 0.26 * sum(name.count("\n") + 1 for name in names), dpi=GRID_DPI) as figure:
        axes = figure.subplots()
        for row, test in enumerate(tests.values()):
            low, high = float(test.null.min()), float(test.null.max())
            axes.plot([low, high], [row, row], color="#808080", linewidth=5, solid_capstyle="butt")
            axes.plot(test.value, row, **point)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(label, loc="right")
        handles = [line_handle("this router", **point), line_handle("permuted patches (range)", linewidth=5)]
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": 2})
