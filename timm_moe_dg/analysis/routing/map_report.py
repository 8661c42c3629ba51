"""Expert maps, entropy maps and attention maps of a run: pictures, and their numbers as JSON."""

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...storage.files import json_text
from ..run_view import RunView
from .annotations import places_of_parts
from .attention import class_attention, head_similarity, mass_mask
from .chosen_images import ImageRows, batches, choose_images, photographs
from .map_plots import Photograph, plot_attention_maps, plot_entropy_maps, plot_expert_maps
from .maps import RoutingMap, chosen_block, mixture_blocks, routing_maps_of


def draw_experts(
    view: RunView,
    figures: Path,
    *,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
    block: int | None,
    parts: Sequence[str] = (),
    cub: Path | None = None,
) -> None:
    """Draws experts.png and entropy.png of a mixture block, None for the last. Writes all blocks to experts.json.

    `parts` are marked on experts.png. Their places come from CUB-200-2011's folder `cub`, or from part maps.
    """
    if parts and images is not None:
        raise ArgumentError.of("parts", list(parts), "files have no annotations; leave out --images")
    block = chosen_block(mixture_blocks(view.model), block)
    rows = choose_images(view, images, target, columns)
    maps = routing_maps_of(view.model, batches(view, rows))
    first, entropy, num_experts = maps[block]
    places = places_of_parts(view, rows, parts, (first.shape[1], first.shape[2]), cub) if parts else repeat({})
    plot_expert_maps(photographs(rows, first, places), num_experts, figures / "experts.png")
    plot_entropy_maps(photographs(rows, entropy), num_experts, figures / "entropy.png")
    numbers = {"model": view.name, "drawn_block": block, "num_experts": num_experts, "images": _numbers(rows, maps)}
    (figures / "experts.json").write_text(json_text(numbers))


def _numbers(rows: ImageRows, maps: dict[int, RoutingMap]) -> list[dict[str, Any]]:
    names = [(name, image.name) for name, row in rows for image in row if image is not None]
    images: list[dict[str, Any]] = [{"domain": domain, "image": name, "blocks": {}} for domain, name in names]
    for block, routing in maps.items():
        for image, first, entropy in zip(images, routing.first.tolist(), _rounded(routing.entropy), strict=True):
            image["blocks"][str(block)] = {"first_expert": first, "entropy": entropy}
    return images


def draw_attention(
    view: RunView,
    figures: Path,
    *,
    twin: RunView | None,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
    mass: float | None,
) -> dict[str, float]:
    """Draws attention.png, a row for each image and network (`twin` is a dense run), and writes attention.json.

    `mass` shows the fewest patches that hold this share of a map. Returns each network's mean cosine between heads.
    """
    rows = choose_images(view, images, target, columns)
    # A row of pictures for each image and network: those of one domain fill a page
    rows = rows if images is not None else rows[:1]
    networks = {view.name: view}
    if twin is not None:
        networks = {twin.name if twin.name != view.name else f"{twin.name} (twin)": twin, **networks}
    maps = {
        label: torch.cat([class_attention(network.model, *batch) for batch in batches(network, rows)])
        for label, network in networks.items()
    }
    similarity = {label: float(head_similarity(values).mean()) for label, values in maps.items()}
    displayed = maps if mass is None else {label: v.where(mass_mask(v, mass), 0.0) for label, v in maps.items()}
    photos = [photo for _, row in photographs(rows, next(iter(maps.values()))) for photo in row if photo is not None]
    lines = [
        (f"{photo.name} {label}", [Photograph(photo.name, photo.pixels, values[index])])
        for index, photo in enumerate(photos)
        for label, values in displayed.items()
    ]
    plot_attention_maps(lines, figures / "attention.png")
    numbers = {
        "head_similarity": similarity,
        "mass": mass,
        "images": [photo.name for photo in photos],
        "maps": {label: _rounded(values) for label, values in maps.items()},
    }
    (figures / "attention.json").write_text(json_text(numbers))
    return similarity


def _rounded(values: Tensor) -> Any:
    return (values.double() * 1e5).round().div(1e5).tolist()  # five digits keep the file small
