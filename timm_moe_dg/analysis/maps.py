"""Maps of images: the first expert of each patch, the entropy of its routing, and the class token's attention by head.

Expert maps are those of GMoE (Li et al., ICLR 2023), figures 3 and 8 to 17. The similarity of heads is that of SF-MoE
(Li et al., 2022), figure 3.

Axes: B images, H x W patches, E experts, M heads.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ..protocols.evaluation import evaluation_mode
from ..storage.files import json_text
from .run_view import Batch, ChosenImage, ImageRows, RunView, choose_images, small_pixels
from .style import LEGEND_BELOW, Style, expert_color, image_grid, swatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPACITY = 0.55
MAX_NUMBERS = 14  # patches along a side; numbers of more cannot be read
UNIT = (0.0, 1.0, 1.0, 0.0)  # left, right, bottom and top of an image


class RoutingMap(NamedTuple):
    """The routing of one mixture block. A MoGE model routes whole images: H = W = 1."""

    first: Tensor  # (B, H, W) int64, the expert with the largest weight; -1 if only the shared expert is used
    entropy: Tensor  # (B, H, W) of the noiseless routing probabilities, in nats: 0 to log(E)
    num_experts: int


def mixture_blocks(model: Network) -> dict[int, RoutedMlp]:
    """The mixture layers of a vision transformer, by block. Raises ArgumentError if there are none."""
    mlps = {index: getattr(block, "mlp", None) for index, block in enumerate(getattr(model, "blocks", ()))}
    blocks = {index: mlp for index, mlp in mlps.items() if isinstance(mlp, RoutedMlp)}
    if not blocks:
        remedy = "is a dense model without experts; give a mixture, such as gmoe_small_patch16"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    return blocks


def chosen_block(model: Network, block: int | None) -> int:
    """Returns the index of a model's mixture block, by default the last one."""
    blocks = mixture_blocks(model)
    if block is not None and block not in blocks:
        raise ArgumentError.of("block", block, f"holds no experts; choose from {', '.join(map(str, blocks))}")
    return max(blocks) if block is None else block


def routing_maps(model: Network, batches: Iterable[tuple[Tensor, ...]]) -> dict[int, RoutingMap]:
    """Routes batches of (images,) or (images, metadata) through an unwrapped model: each mixture block's routing.

    The images of a batch are (B, 3, height, width). The maps of all batches are concatenated, on CPU.
    """
    layers, parts = mixture_blocks(model), []
    with evaluation_mode(model), record_routing(model):
        for batch in batches:
            model(*batch)
            parts.append({index: _map(model, layer, batch[0]) for index, layer in layers.items()})
    joined = {}
    for index, routing in parts[0].items():
        first = torch.cat([part[index].first for part in parts])
        entropy = torch.cat([part[index].entropy for part in parts])
        joined[index] = routing._replace(first=first, entropy=entropy)
    return joined


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
        shape = (len(images), *model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:])))
        prefix = model.num_prefix_tokens  # class and distillation tokens are routed, too
        first, entropy = (values.view(len(images), -1)[:, prefix:] for values in (first, entropy))
    return RoutingMap(first.reshape(shape).cpu(), entropy.reshape(shape).float().cpu(), layer.experts.num_experts)


def class_attention(model: Network, images: Tensor, *metadata: Tensor) -> Tensor:
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
            model(images, *metadata)
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
    images: Sequence[str] | None = None,
    target: str | None = None,
    columns: int = 4,
    block: int | None = None,
) -> None:
    """Draws experts.png and entropy.png of a mixture block, None for the last. Writes all blocks to experts.json."""
    block = chosen_block(view.model, block)
    rows = choose_images(view, images, target, columns)
    maps = routing_maps(view.model, _batches(view, rows))
    first, entropy, num_experts = maps[block]
    plot_expert_maps(rows, first, figures / "experts.png")
    plot_entropy_maps(rows, entropy, num_experts, figures / "entropy.png")
    numbers: list[dict[str, Any]] = [
        {"domain": name, "image": image.name} for name, row in rows for image in row if image is not None
    ]
    for index, of_image in enumerate(numbers):
        of_image["blocks"] = {
            str(key): {"first_expert": routing.first[index].tolist(), "entropy": _rounded(routing.entropy[index])}
            for key, routing in maps.items()
        }
    written = {"model": view.name, "drawn_block": block, "num_experts": num_experts, "images": numbers}
    (figures / "experts.json").write_text(json_text(written))


def draw_attention(
    view: RunView,
    figures: Path,
    *,
    twin: RunView | None = None,
    images: Sequence[str] | None = None,
    target: str | None = None,
    columns: int = 4,
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
    plot_attention_maps(photos, maps, figures / "attention.png")
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


def _rounded(values: Tensor) -> Any:
    return (values.double() * 1e5).round().div(1e5).tolist()  # five digits keep the file small


@contextmanager
def _photographs(rows: ImageRows, path: Path, lines: float) -> Iterator[tuple["Figure", list["Axes"]]]:
    """Yields a figure above `lines` of text, and the axes of all images of the rows, in order, which show them."""
    columns = zip(*(row for _, row in rows), strict=True)
    names = [{image.name for image in column if image is not None} for column in columns]
    titles = [name.pop() if len(name) == 1 else "" for name in names]  # the name that all rows share
    with image_grid(path, [name for name, _ in rows], titles, lines) as (figure, panels):
        with_image = []
        for axes, image in zip(panels.flat, (image for _, row in rows for image in row), strict=True):
            if image is None:
                axes.text(0.5, 0.5, "not in\nthis domain", ha="center", va="center", color="gray")
            else:
                pixels = small_pixels(image.image)
                axes.imshow(pixels, extent=UNIT, aspect=pixels.shape[0] / pixels.shape[1])
                with_image.append(axes)
        yield figure, with_image


def plot_expert_maps(rows: ImageRows, first: Tensor, path: Path) -> None:
    """Draws each image under the colors and numbers of its patches' first experts (B, H, W); -1: the shared alone."""
    from matplotlib.colors import to_rgba
    from matplotlib.patheffects import withStroke

    experts, (_, down, across) = first.unique().tolist(), first.shape
    handles = [swatch(expert_color(index), f"expert {index}" if index >= 0 else "shared only") for index in experts]
    columns = max(2, len(rows[0][1]))
    outline = [withStroke(linewidth=1.5, foreground="white")]  # for dark photographs
    with _photographs(rows, path, math.ceil(len(handles) / columns) + 1.5) as (figure, panels):
        for axes, values in zip(panels, first.numpy(), strict=True):
            # Transparent where there is no routed expert
            colors = [to_rgba(expert_color(int(index)), OPACITY * (index >= 0)) for index in values.flat]
            colored = np.reshape(colors, (down, across, 4))
            axes.imshow(colored, extent=UNIT, aspect=axes.get_aspect(), interpolation="nearest")
            for (row, column), index in np.ndenumerate(values) if max(down, across) <= MAX_NUMBERS else ():
                text = axes.text((column + 0.5) / across, (row + 0.5) / down, str(index), ha="center", va="center")
                text.set(size=min(50 / max(down, across), 20), path_effects=outline)
        figure.legend(handles=handles, title="first expert", **{**LEGEND_BELOW, "ncols": columns})


def plot_entropy_maps(rows: ImageRows, entropy: Tensor, num_experts: int, path: Path) -> None:
    """Draws the entropy of each patch's noiseless routing probabilities, given in nats, divided by log(E)."""
    shares = entropy.numpy() / (math.log(num_experts) or 1.0)
    with _photographs(rows, path, 4) as (figure, panels):
        for axes, values in zip(panels, shares, strict=True):
            scale: Style = {"cmap": "cividis", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
            image = axes.imshow(values, extent=UNIT, aspect=axes.get_aspect(), **scale)
        bar = figure.colorbar(image, ax=figure.axes, orientation="horizontal", aspect=40, fraction=0.04)
        bar.set_label("entropy of the routing / log E")


def plot_attention_maps(images: Sequence[ChosenImage], maps: Mapping[str, Tensor], path: Path) -> None:
    """Draws a row for each image and network: the map of each head on a scale of its own, and the image."""
    heads = max(values.shape[1] for values in maps.values())
    columns = [*(f"head {head}" for head in range(heads)), "image"]
    pairs = [(image, label, values[index]) for index, image in enumerate(images) for label, values in maps.items()]
    with image_grid(path, [f"{image.name} {label}" for image, label, _ in pairs], columns) as (_, panels):
        for line, (image, _, values) in zip(panels, pairs, strict=True):
            for axes, weights in zip(line, values.numpy(), strict=False):
                axes.imshow(weights, cmap="cividis", vmin=0, interpolation="nearest")
            line[-1].imshow(small_pixels(image.image))
