"""Draws a diagram of each model family, docs/pictures/model_NAME.svg, from the registered models.

python -m tests.draw_models
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.layers.moe_mlp import RoutedMlp

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MODELS = {
    "gmoe": ("gmoe_small_patch16", "GMoE: cosine routers in blocks 8 and 10"),
    "sfmoe": ("sfmoe_small", "SF-MoE: sparse and fusion blocks in turn"),
    "hybrid_sfmoe": ("hybrid_sfmoe_r26_s16", "Hybrid SF-MoE: a ResNet before the blocks"),
    "moge": ("moge_tiny", "MoGE: experts chosen by the place of the image"),
}
SIZES: dict[str, Any] = {"embed_dim": 12, "num_heads": 3}  # the diagrams do not depend on them
WIDTH = 800
TEXT, EDGE = "#1c2b45", "#3b5b92"
DENSE, SPARSE, CHOSEN, PLAIN = "#eef3fb", "#f7c873", "#f7c873", "#ffffff"
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="sans-serif" font-size="19">\n'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="{2}"/></marker></defs>\n<rect width="{0}" height="{1}" fill="white"/>'
)


def box(x: float, y: float, width: float, height: float, *lines: str, fill: str = DENSE, dashed: bool = False) -> str:
    """Returns a rectangle, given by its center, with lines of text in it."""
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    shape = (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{fill}" stroke="{EDGE}"{dashes}/>'
    )
    return "\n".join([shape, *label(x, y, *lines)])


def label(x: float, y: float, *lines: str, anchor: str = "middle") -> list[str]:
    """Returns lines of text, centered vertically at y."""
    first = y + 7 - 12 * (len(lines) - 1)
    return [
        f'<text x="{x:g}" y="{first + 24 * row:g}" text-anchor="{anchor}" fill="{TEXT}">{line}</text>'
        for row, line in enumerate(lines)
    ]


def arrow(*points: tuple[float, float], faint: bool = False) -> str:
    """Returns a line through points with a tip at its end; a dashed one where nothing passes."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    look = 'stroke="#b8c0cc" stroke-dasharray="5 5"' if faint else f'stroke="{EDGE}" marker-end="url(#tip)"'
    return f'<polyline points="{path}" fill="none" stroke-width="2" {look}/>'


def network_row(model: Any, stem: str) -> list[str]:
    """Draws the image, the stem, every block with its number, and the classifier."""
    y, first, step = 90, 250, 36
    last = first + step * (len(model.blocks) - 1)
    parts = [
        box(45, y, 74, 50, "image", fill=PLAIN),
        box(153, y, 106, 62, *stem.split("/")),
        box(last + 84, y, 98, 50, "classifier"),
        arrow((82, y), (98, y)),
        arrow((206, y), (first - 20, y)),
        arrow((last + 16, y), (last + 33, y)),
    ]
    for index, block in enumerate(model.blocks):
        fill = SPARSE if isinstance(block.mlp, RoutedMlp) else DENSE
        parts.append(box(first + step * index, y, 32, 62, str(index), fill=fill))
    legend = [(box(258, 152, 22, 22, fill=DENSE), "dense block"), (box(438, 152, 22, 22, fill=SPARSE), "mixture block")]
    for (square, text), x in zip(legend, (278, 458), strict=True):
        parts += [square, *label(x, 152, text, anchor="start")]
    return parts


def experts_column(x: float, tops: Sequence[float], chosen: set[int], source: float, target: float) -> list[str]:
    """Draws experts above each other, with arrows to and from those that are chosen."""
    middle = sum(tops) / len(tops)
    parts = []
    for number, y in enumerate(tops):
        on = number in chosen
        parts += [
            box(x, y, 112, 30, f"expert {number}", fill=CHOSEN if on else PLAIN, dashed=not on),
            arrow((source, middle), (x - 58, y), faint=not on),
        ]
        if on:
            parts.append(arrow((x + 56, y), (target, middle)))
    return parts


def mixture_layer(model: Any) -> Any:
    """Returns the feed-forward of the first mixture block."""
    return next(block.mlp for block in model.blocks if isinstance(block.mlp, RoutedMlp))


def token_layer(model: Any) -> list[str]:
    """Draws the feed-forward of a token-routed mixture block."""
    router = mixture_layer(model).router
    kind = "cosine" if "Cosine" in type(router).__name__ else "linear"
    tops = [225 + 38 * number for number in range(router.num_experts)]
    middle = sum(tops) / len(tops)
    chosen = {1, 4} if router.top_k == 2 else set(range(router.top_k))
    return [
        *label(20, 195, "In a mixture block, the router chooses experts for each token:", anchor="start"),
        box(62, middle, 86, 50, "token", fill=PLAIN),
        box(225, middle, 150, 62, f"{kind} router", f"top {router.top_k} of {router.num_experts}"),
        arrow((105, middle), (149, middle)),
        *experts_column(440, tops, chosen, 300, 560),
        box(636, middle, 150, 62, "sum weighted", "by the router"),
        arrow((711, middle), (780, middle)),
    ]


def place_layer(model: Any) -> list[str]:
    """Draws the feed-forward of a metadata-routed mixture block."""
    layer = mixture_layer(model)
    tops = [225 + 38 * number for number in range(layer.router.num_experts)]
    middle = sum(tops) / len(tops)
    chosen = set(range(0, 2 * layer.router.top_k, 2))
    low = tops[-1] + 56
    return [
        *label(
            20, 195, "In a mixture block, the place of the image chooses the experts for its tokens:", anchor="start"
        ),
        box(92, tops[0] + 20, 148, 62, "longitude,", "latitude", fill=PLAIN),
        box(92, middle + 22, 148, 62, "location", "encoder"),
        arrow((92, tops[0] + 51), (92, middle - 9)),
        box(270, middle + 22, 136, 62, "cosine router", f"top {layer.router.top_k} of {layer.router.num_experts}"),
        arrow((166, middle + 22), (201, middle + 22)),
        *experts_column(440, tops, chosen, 340, 560),
        box(92, low, 148, 40, "tokens", fill=PLAIN),
        box(440, low, 150, 40, "shared expert", fill=CHOSEN),
        arrow((166, low), (364, low)),
        arrow((515, low), (640, low), (640, middle + 32)),
        box(640, middle, 156, 62, "\u03b3 shared +", "(1 \u2212 \u03b3) routed"),
        arrow((718, middle), (785, middle)),
    ]


def draw(name: str) -> str:
    """Draws the SVG of one model family."""
    architecture, title = MODELS[name]
    model = timm.create_model(architecture, **SIZES)
    stem = "ResNet-26/32 px" if name == "hybrid_sfmoe" else "patches/16 px"
    layer = place_layer(model) if name == "moge" else token_layer(model)
    height = 515 if name == "moge" else 450
    rows = [HEAD.format(WIDTH, height, EDGE), *label(20, 30, title, anchor="start"), *network_row(model, stem), *layer]
    return "\n".join([*rows, "</svg>\n"])


def main(folder: Path = FOLDER) -> None:
    """Writes the diagrams."""
    for name in MODELS:
        (folder / f"model_{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
