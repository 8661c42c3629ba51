"""Maps of images: the first expert of each patch, the entropy of its routing, and the class token's attention by head.

Expert maps are those of GMoE (Li et al., ICLR 2023), figures 3 and 8 to 17. The similarity of heads is that of SF-MoE
(Li et al., 2022), figure 3.

Axes: B images, H x W patches, E experts, M heads.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
from ..layers import GeoMoeMlp, RoutedMlp
from ..losses import record_routing
from ..networks.build import Network
from ..storage.files import json_text
from .run_view import Batch, ImageRows, RunView, choose_images, evaluation_mode, small_pixels
from .style import (
    GRID_SIDE,
    LEGEND_BELOW,
    expert_color,
    image_grid,
    swatch,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OPACITY = 0.55
MIN_CELL = 0.1  # inches; a number in a smaller patch cannot be read


class RoutingMap(NamedTuple):
    """The routing of one mixture block. A MoGE model routes whole images: H = W = 1."""

    first: Tensor  # (B, H, W) int64, the expert with the largest weight; -1 if only the shared expert is used
    entropy: Tensor  # (B, H, W) of the noiseless routing probabilities, in nats: 0 to log(E)
    num_experts: int


@dataclass(frozen=True)
class Photograph:
    """One panel: an image with values of its patches."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3)
    values: Tensor  # (H, W) experts or entropies of the patches, or (M, H, W) attention by head


Rows = Sequence[tuple[str, Sequence[Photograph | None]]]  # name of the row, and its panels; None if missing


def mixture_blocks(model: Network) -> dict[int, RoutedMlp]:
    """The mixture layers of a vision transformer, by block. Raises ArgumentError if there are none."""
    mlps = {index: getattr(block, "mlp", None) for index, block in enumerate(getattr(model, "blocks", ()))}
    blocks = {index: mlp for index, mlp in mlps.items() if isinstance(mlp, RoutedMlp)}
    if not blocks:
        remedy = "is a dense model without experts; give a mixture, such as gmoe_small_patch16"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    return blocks


def routing_maps(model: Network, images: Tensor, metadata: Tensor | None = None) -> dict[int, RoutingMap]:
    """Routes images (B, 3, height, width) through an unwrapped model: each mixture block's routing, on CPU."""
    layers = mixture_blocks(model)
    with evaluation_mode(model), record_routing(model):
        model(images) if metadata is None else model(images, metadata)
        return {index: _map(model, layer, images) for index, layer in layers.items()}


def routing_maps_of(model: Network, batches: Iterable[tuple[Tensor, ...]]) -> dict[int, RoutingMap]:
    """Concatenates `routing_maps` of batches of (images,) or (images, metadata)."""
    parts = [routing_maps(model, *batch) for batch in batches]
    joined = {}
    for index, routing in parts[0].items():
        first, entropy = (torch.cat([part[index][field] for part in parts]) for field in (0, 1))
        joined[index] = routing._replace(first=first, entropy=entropy)
    return joined


def chosen_block(maps: Mapping[int, object], block: int | None) -> int:
    """The index of a mixture block; None stands for the last one."""
    if block is not None and block not in maps:
        raise ArgumentError.of("block", block, f"holds no experts; choose from {', '.join(map(str, maps))}")
    return max(maps) if block is None else block


def _map(model: Network, layer: RoutedMlp, images: Tensor) -> RoutingMap:
    routing = layer.routing
    assert routing is not None, "nothing was recorded"
    first, entropy = routing.expert_indices[:, 0], torch.special.entr(routing.probabilities).sum(-1)
    if isinstance(layer, GeoMoeMlp):
        shape: tuple[int, ...] = (len(images), 1, 1)
        first = first if layer.forced_expert is None else torch.full_like(first, layer.forced_expert)
        first = first if routing.routed is None else first.masked_fill(~routing.routed, -1)  # images without metadata
        entropy = entropy.masked_fill(first < 0, 0.0)
    else:
        grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
        shape = (len(images), *grid)
        prefix = model.num_prefix_tokens  # class and distillation tokens are routed, too
        first, entropy = (values.view(len(images), -1)[:, prefix:] for values in (first, entropy))
    return RoutingMap(first.reshape(shape).cpu(), entropy.reshape(shape).float().cpu(), layer.experts.num_experts)


def class_attention(model: Network, images: Tensor, metadata: Tensor | None = None) -> Tensor:
    """The last block's attention from the class token to the patches, for images (B, 3, height, width).

    The result is (B, M, H, W) on CPU. Each head's weights sum to 1 minus the weights of the prefix tokens.
    """
    if getattr(model, "cls_token", None) is None:
        raise ArgumentError.of("model", type(model).__name__, "has no class token; give a vision transformer with one")
    # The input of the layer's dropout is the softmax of the scores, which the fused kernel does not compute
    attention, weights = model.blocks[-1].attn, list[Tensor]()
    fused = attention.fused_attn
    handle = attention.attn_drop.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0].detach()))
    try:
        attention.fused_attn = False
        with evaluation_mode(model):
            model(images) if metadata is None else model(images, metadata)
    finally:
        attention.fused_attn = fused
        handle.remove()
    grid = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
    return weights[-1][:, :, 0, model.num_prefix_tokens :].unflatten(-1, grid).float().cpu()


def head_similarity(maps: Tensor) -> Tensor:
    """Mean cosine similarity between the maps of two different heads: (B, M, H, W) -> (B,); NaN for a single head."""
    rows = F.normalize(maps.flatten(2).double(), dim=-1)
    cosines = rows @ rows.transpose(1, 2)
    first, second = torch.triu_indices(maps.shape[1], maps.shape[1], offset=1)
    return cosines[:, first, second].mean(1)


def draw_experts(
    view: RunView,
    figures: Path,
    *,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
    block: int | None,
) -> None:
    """Draws experts.png and entropy.png of a mixture block, None for the last. Writes all blocks to experts.json."""
    block = chosen_block(mixture_blocks(view.model), block)
    rows = choose_images(view, images, target, columns)
    maps = routing_maps_of(view.model, _batches(view, rows))
    first, entropy, num_experts = maps[block]
    plot_expert_maps(_photographs(rows, first), figures / "experts.png")
    plot_entropy_maps(_photographs(rows, entropy), num_experts, figures / "entropy.png")
    named = [(name, image.name) for name, row in rows for image in row if image is not None]
    by_block = {
        str(index): [
            {"first_expert": first, "entropy": entropy}
            for first, entropy in zip(routing.first.tolist(), _rounded(routing.entropy), strict=True)
        ]
        for index, routing in maps.items()
    }
    numbers = [
        {"domain": domain, "image": name, "blocks": {key: values[index] for key, values in by_block.items()}}
        for index, (domain, name) in enumerate(named)
    ]
    written = {"model": view.name, "drawn_block": block, "num_experts": num_experts, "images": numbers}
    (figures / "experts.json").write_text(json_text(written))


def draw_attention(
    view: RunView,
    figures: Path,
    *,
    twin: RunView | None,
    images: Sequence[str] | None,
    target: str | None,
    columns: int,
) -> dict[str, float]:
    """Draws attention.png, a row for each image and network (`twin` is a dense run), and writes attention.json.

    Returns each network's mean cosine between heads.
    """
    rows = choose_images(view, images, target, columns)
    # A row of pictures for each image and network: those of one domain fill a page
    rows = rows if images is not None else rows[:1]
    networks = {view.name: view}
    if twin is not None:
        networks = {twin.name if twin.name != view.name else f"{twin.name} (twin)": twin, **networks}
    maps = {
        label: torch.cat([class_attention(network.model, *batch) for batch in _batches(network, rows)])
        for label, network in networks.items()
    }
    similarity = {label: float(head_similarity(values).mean()) for label, values in maps.items()}
    photos = [image for _, row in rows for image in row if image is not None]
    lines = [
        (f"{photo.name} {label}", [Photograph(photo.name, small_pixels(photo.image), values[index])])
        for index, photo in enumerate(photos)
        for label, values in maps.items()
    ]
    plot_attention_maps(lines, figures / "attention.png")
    numbers = {
        "head_similarity": similarity,
        "images": [photo.name for photo in photos],
        "maps": {label: _rounded(values) for label, values in maps.items()},
    }
    (figures / "attention.json").write_text(json_text(numbers))
    return similarity


def _batches(view: RunView, rows: ImageRows) -> Iterator[Batch]:
    """The network's inputs for all images of the rows, in order."""
    return view.batches((image.image, image.metadata) for _, row in rows for image in row if image is not None)


def _photographs(rows: ImageRows, values: Tensor) -> Rows:
    """Pairs images with values (B, ...), in the order of `_batches`."""
    remaining = iter(values)
    return [
        (name, [image and Photograph(image.name, small_pixels(image.image), next(remaining)) for image in row])
        for name, row in rows
    ]


def _rounded(values: Tensor) -> Any:
    return (values.double() * 1e5).round().div(1e5).tolist()  # five digits keep the file small


def plot_expert_maps(rows: Rows, path: Path) -> None:
    """Draws each image under the colors and numbers of its patches' first experts; -1 is the shared expert alone."""
    from matplotlib.colors import to_rgba

    experts = sorted({int(index) for photo in _present(rows) for index in photo.values.flatten().tolist()})
    handles = [swatch(expert_color(index), f"expert {index}" if index >= 0 else "shared only") for index in experts]
    across = max(2, len(rows[0][1]))
    lines = math.ceil(len(handles) / across)
    with image_grid(path, [name for name, _ in rows], _column_names(rows), lines + 1.5) as (figure, panels):
        for axes, photo in _filled(panels, rows):
            _draw(axes, photo, photo.pixels)
            # Transparent where there is no routed expert
            colors = [to_rgba(expert_color(int(index)), OPACITY * (index >= 0)) for index in photo.values.flatten()]
            _draw(axes, photo, np.reshape(colors, (*photo.values.shape, 4)))
            _numbers(axes, photo)
        figure.legend(handles=handles, title="first expert", **{**LEGEND_BELOW, "ncols": across})


def plot_entropy_maps(rows: Rows, num_experts: int, path: Path) -> None:
    """Draws the entropy of each patch's noiseless routing probabilities, given in nats, divided by log(E)."""
    largest = math.log(num_experts) if num_experts > 1 else 1.0
    image: Any = None
    with image_grid(path, [name for name, _ in rows], _column_names(rows), 4) as (figure, panels):
        for axes, photo in _filled(panels, rows):
            image = axes.imshow(photo.values.numpy() / largest, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        bar = figure.colorbar(image, ax=list(panels.flat), orientation="horizontal", aspect=40, fraction=0.04)
        bar.set_label("entropy of the routing / log E")


def plot_attention_maps(rows: Rows, path: Path) -> None:
    """Draws a row for each image and network: the map of each head on a scale of its own, and the image."""
    heads = max(len(photo.values) for photo in _present(rows))
    columns = [*(f"head {head}" for head in range(heads)), "image"]
    with image_grid(path, [name for name, _ in rows], columns) as (_, panels):
        for line, photo in zip(panels, _present(rows), strict=True):
            for axes, values in zip(line, photo.values, strict=False):
                axes.imshow(values.numpy(), cmap="cividis", vmin=0, interpolation="nearest")
            _draw(line[-1], photo, photo.pixels)


def _present(rows: Rows) -> list[Photograph]:
    return [photo for _, photos in rows for photo in photos if photo is not None]


def _column_names(rows: Rows) -> list[str]:
    """Titles of the columns: the photographs' name if all of a column share one, else a number."""
    columns = zip(*(photos for _, photos in rows), strict=True)
    names = [{photo.name for photo in column if photo is not None} for column in columns]
    return [of_column.pop() if len(of_column) == 1 else f"image {number}" for number, of_column in enumerate(names, 1)]


def _filled(panels: np.ndarray, rows: Rows) -> list[tuple[Any, Photograph]]:
    """Pairs of axes and photographs; writes a note into panels without a photograph."""
    pairs = []
    for line, (_, photos) in zip(panels, rows, strict=True):
        for axes, photo in zip(line, photos, strict=True):
            if photo is None:
                axes.text(0.5, 0.5, "not in\nthis domain", ha="center", va="center", color="gray")
            else:
                pairs.append((axes, photo))
    return pairs


def _draw(axes: "Axes", photo: Photograph, colors: np.ndarray) -> None:
    """Stretches pixels or patches over the photograph's panel."""
    height, width = photo.pixels.shape[:2]
    axes.imshow(colors, extent=(0, width, height, 0), interpolation="nearest")


def _numbers(axes: "Axes", photo: Photograph) -> None:
    """Writes the experts' numbers into cells that are large enough."""
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=1.5, foreground="white")]  # for dark photographs
    (height, width), (down, across) = photo.pixels.shape[:2], photo.values.shape
    cell = GRID_SIDE * min(height / down, width / across) / max(height, width)
    if cell < MIN_CELL:
        return
    for (row, column), index in np.ndenumerate(photo.values.numpy()):
        x, y = (column + 0.5) * width / across, (row + 0.5) * height / down
        text = axes.text(x, y, str(index) if index >= 0 else "shared", ha="center", va="center", color="black")
        text.set(size=min(36 * cell, 20), in_layout=False, path_effects=outline)
