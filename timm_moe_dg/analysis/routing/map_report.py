"""Expert selection maps and attention maps of a run: pictures, and the numbers behind them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...networks.build import Network
from ...storage.json_text import json_text
from ..run_view import RunView
from .attention import class_attention, head_similarity, mass_mask
from .chosen_images import ShownRows, photographs, seen, shown_images
from .map_plots import Photograph, plot_attention_maps, plot_entropy_maps, plot_expert_maps
from .maps import chosen_block, mixture_blocks, routing_maps


def draw_experts(
    view: RunView,
    figures: Path,
    *,
    data_dir: str | None,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
    block: int | None,
) -> None:
    """Draws experts.png and entropy.png of one mixture block; experts.json has the indices of all of them.

    Args:
        view: The run.
        figures: Folder to write to.
        data_dir: See `shown_images`.
        images: See `shown_images`.
        target: See `shown_images`.
        columns: See `shown_images`.
        block: The block to draw; None for the last one with experts.

    Raises:
        ArgumentError: The model has no experts, or not in that block; see also `shown_images`.
        DataError: See `shown_images`.
    """
    block = chosen_block(mixture_blocks(view.model), block)
    rows = shown_images(view, data_dir, images, target, columns)
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    num_experts = 0

    def ask(model: Network, batch: Tensor, metadata: Tensor | None) -> Tensor:
        nonlocal num_experts
        maps = routing_maps(model, batch, metadata)
        num_experts = maps[block].num_experts
        for index, each in maps.items():
            found.setdefault(index, []).extend(zip(each.first, each.entropy, strict=True))
        return batch

    list(seen(view, rows, ask))
    first, entropy = (list(values) for values in zip(*found[block], strict=True))
    plot_expert_maps(photographs(rows, first), num_experts, figures / "experts.png")
    plot_entropy_maps(photographs(rows, entropy), num_experts, figures / "entropy.png")
    numbers = {"model": view.name, "drawn_block": block, "num_experts": num_experts, "images": _named(rows, found)}
    (figures / "experts.json").write_text(json_text(numbers))


def _named(rows: ShownRows, found: dict[int, list[tuple[Tensor, Tensor]]]) -> list[dict[str, object]]:
    """For each image, the first experts and entropies of every mixture block."""
    names = [(name, each.name) for name, row in rows for each in row if each is not None]
    return [
        {
            "domain": domain,
            "image": name,
            "blocks": {
                str(block): {"first_expert": maps[at][0].tolist(), "entropy": _rounded(maps[at][1])}
                for block, maps in found.items()
            },
        }
        for at, (domain, name) in enumerate(names)
    ]


def draw_attention(
    view: RunView,
    twin: RunView | None,
    figures: Path,
    *,
    data_dir: str | None,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
    mass: float | None,
) -> dict[str, float]:
    """Draws attention.png, a row for each image and network, the dense twin above; attention.json has the numbers.

    Args:
        view: The run.
        twin: The dense model's, or None.
        figures: Folder to write to.
        data_dir: See `shown_images`.
        images: See `shown_images`.
        target: See `shown_images`.
        columns: Images of each domain; only the first domain's are drawn if there are several.
        mass: Show the fewest patches that hold this share of each map; None for all.

    Returns:
        Network -> mean cosine between the maps of two heads, over the images.

    Raises:
        ArgumentError: A network has no class token; see also `shown_images`.
        DataError: See `shown_images`.
    """
    rows = shown_images(view, data_dir, images, target, columns)
    rows = rows if images is not None else rows[:1]
    networks = [*([] if twin is None else [twin]), view]
    maps = [torch.stack(list(seen(each, rows, class_attention))) for each in networks]
    similar = {_label(each, view): float(head_similarity(m).mean()) for each, m in zip(networks, maps, strict=True)}
    drawn = [m if mass is None else m.masked_fill(~mass_mask(m, mass), 0.0) for m in maps]
    shown = [photo for _, row in photographs(rows, list(maps[0])) for photo in row if photo is not None]
    lines = [
        (f"{photo.name} {_label(each, view)}", [Photograph(photo.name, photo.pixels, values[at])])
        for at, photo in enumerate(shown)
        for each, values in zip(networks, drawn, strict=True)
    ]
    plot_attention_maps(lines, figures / "attention.png")
    numbers = {
        "head_similarity": similar,
        "mass": mass,
        "images": [photo.name for photo in shown],
        "maps": {_label(each, view): _rounded(values) for each, values in zip(networks, maps, strict=True)},
    }
    (figures / "attention.json").write_text(json_text(numbers))
    return similar


def _label(network: RunView, view: RunView) -> str:
    return network.name if network is view or network.name != view.name else f"{network.name} (twin)"


def _rounded(values: Tensor) -> object:
    return (values.double() * 1e5).round().div(1e5).tolist()
