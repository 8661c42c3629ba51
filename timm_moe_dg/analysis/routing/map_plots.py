"""Pictures of routing: expert, entropy and attention maps of images, tables of counts, statistics with their nulls."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..style import (
    GRID_SIDE,
    LEGEND_BELOW,
    LETTER_WIDTH,
    Style,
    category_color,
    expert_color,
    fitted,
    image_grid,
    line_handle,
    small_picture,
    swatch,
    text_size,
    write_numbers,
)
from .association import PermutationTest
from .parts import Association

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPACITY = 0.55
MAX_HEADS = 6  # attention heads in a row; labels of more are too small to read
MIN_CELL = 0.1  # inches; a number in a smaller patch cannot be read
MARKERS = "o^sDvPX*<>"  # of parts
MAX_LIFT = 8.0  # end of the color scale
MAX_ROWS, MAX_COLUMNS = 40, 16  # of tables with numbers
COLUMN_WIDTH, NUMBER_SIZE = 0.36, 8.0  # inches, and points of a number that fits into them


Places = dict[str, tuple[float, float]]  # part -> x and y in an image, as shares of its width and height


@dataclass(frozen=True)
class Photograph:
    """One panel: an image with values of its patches."""

    name: str
    pixels: np.ndarray  # uint8 (height, width, 3)
    values: Tensor  # (H, W) experts or entropies of the patches, or (M, H, W) attention by head
    parts: Places = field(default_factory=dict)


Rows = Sequence[tuple[str, Sequence[Photograph | None]]]  # name of the row, and its panels; None if missing


def plot_expert_maps(rows: Rows, num_experts: int, path: Path) -> None:
    """Draws each image under the colors and numbers of its patches' first experts; -1 is the shared expert alone.

    Marked parts replace the numbers. Lines join a part's places in a row.
    """
    from matplotlib.colors import to_rgba

    experts = sorted({int(index) for photo in _present(rows) for index in photo.values.flatten().tolist()})
    unused = num_experts - len([index for index in experts if index >= 0])
    one_cell = all(photo.values.numel() == 1 for photo in _present(rows))
    title = f"first expert of each {'image' if one_cell else 'patch'}" + (f"; {unused} nowhere" if unused else "")
    width = GRID_SIDE * len(rows[0][1])
    title = fitted(title, int(72 * width / (LETTER_WIDTH * text_size(width))))
    names = dict.fromkeys(name for photo in _present(rows) for name in photo.parts)
    style: Style = {"linestyle": "", "color": "white", "markeredgecolor": "black", "markersize": 6}
    marks = {name: {**style, "marker": MARKERS[index % len(MARKERS)]} for index, name in enumerate(names)}
    entries = [swatch(expert_color(index), f"expert {index}" if index >= 0 else "shared only") for index in experts]
    for entry in entries:
        entry.set(edgecolor="gray", linewidth=0.5)
    handles = [*entries, *(line_handle(name, **mark) for name, mark in marks.items())]
    across = max(2, len(rows[0][1]))
    lines = math.ceil(len(handles) / across)
    lines += title.count("\n")
    with image_grid(path, [name for name, _ in rows], _column_names(rows), lines + 1.5) as (figure, panels):
        for axes, photo in _filled(panels, rows):
            _draw(axes, photo, photo.pixels)
            # Transparent where there is no routed expert
            colors = [to_rgba(expert_color(int(index)), OPACITY * (index >= 0)) for index in photo.values.flatten()]
            _draw(axes, photo, np.reshape(colors, (*photo.values.shape, 4)))
            if not marks:
                _numbers(axes, photo)
        for line, (_, photos) in zip(panels, rows, strict=True):
            _join_parts(figure, list(zip(line, photos, strict=True)), marks)
        figure.legend(handles=handles, title=title, **{**LEGEND_BELOW, "ncols": across})


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
    across = min(heads, MAX_HEADS)
    lines = -(-heads // across)
    above = [f"head {head}" if lines == 1 else "" for head in range(across)]
    names = [name if line == 0 else "" for name, _ in rows for line in range(lines)]
    with image_grid(path, names, [*above, "image"]) as (_, panels):
        for index, (_, (photo, *_)) in enumerate(rows):
            row_panels = panels[index * lines : (index + 1) * lines]
            if photo is not None:
                for head, (axes, values) in enumerate(zip(row_panels[:, :across].flat, photo.values, strict=False)):
                    axes.imshow(values.numpy(), cmap="cividis", vmin=0, interpolation="nearest")
                    if lines > 1:
                        axes.set_title(f"head {head}")
                _draw(row_panels[0, -1], photo, photo.pixels)


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


def _join_parts(figure: "Figure", photos: Sequence[tuple[Any, Photograph | None]], marks: Mapping[str, Style]) -> None:
    from matplotlib.patches import ConnectionPatch

    for name, mark in marks.items():
        places = []
        for axes, photo in photos:
            if photo is not None and name in photo.parts:
                (x, y), (height, width) = photo.parts[name], photo.pixels.shape[:2]
                places.append((axes, (x * width, y * height)))
                axes.plot(x * width, y * height, **mark)
        for (axes, place), (other, following) in itertools.pairwise(places):
            ends = {"xyA": place, "xyB": following, "axesA": axes, "axesB": other}
            figure.add_artist(ConnectionPatch(**ends, coordsA="data", coordsB="data", color="#555555", linewidth=0.8))


def plot_association(association: Association, title: str, path: Path) -> None:
    """Draws a table twice: shares of each row, and lift over independence. Empty rows are hatched."""
    rows, experts = association.shares.shape
    names = [fitted(name, 30) for name in association.rows]
    width = 3.0 + 2 * max(1.4, COLUMN_WIDTH * experts)
    height = max(0.28, text_size(width) / 52) * sum(name.count("\n") + 1 for name in names)
    strength = "undefined" if np.isnan(association.cramers_v) else f"{association.cramers_v:.3f}"
    numbers = f"NMI {association.nmi.value:.3f} (p {association.nmi.p:.3g}), Cramer's V {strength}"
    shares, bound = association.shares.numpy(), np.log2(MAX_LIFT)
    with np.errstate(divide="ignore"):  # log2(0) is -inf, which is clipped
        log_lift = np.log2(association.lift.numpy()).clip(-bound, bound)
    largest, strongest = (float(np.nan_to_num(np.abs(values)).max(initial=0.1)) for values in (shares, log_lift))
    with small_picture(path, width, 2.2 + height) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _table(left, shares, "share of the row", figure, cmap="cividis", vmin=0, vmax=largest)
        _table(right, log_lift, "log2 of the lift", figure, cmap="PuOr_r", vmin=-strongest, vmax=strongest)
        left.set_yticks(range(rows), names)
        figure.suptitle(f"{fitted(title, int(72 * width / (LETTER_WIDTH * text_size(width))))}\n{numbers}")


def plot_nulls(
    tests: Mapping[str, PermutationTest], label: str, path: Path, baseline: Mapping[str, float] | None = None
) -> None:
    """Draws statistics as points on the ranges of their null distributions, and an untrained router's as rings."""
    names, untrained = [fitted(name, 34) for name in tests], baseline or {}
    point: Style = {"marker": "o", "linestyle": "", "color": category_color(1)}
    ring: Style = {**point, "color": category_color(0), "fillstyle": "none", "markeredgewidth": 1.8}
    with small_picture(path, 6.0, 1.9 + 0.26 * sum(name.count("\n") + 1 for name in names)) as figure:
        axes = figure.subplots()
        for row, (name, test) in enumerate(tests.items()):
            low, high = float(test.null.min()), float(test.null.max())
            axes.plot([low, high], [row, row], color="#808080", linewidth=5, solid_capstyle="butt")
            axes.plot(test.value, row, **point, markersize=6)
            axes.plot(untrained.get(name, np.nan), row, **ring, markersize=9)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(label, loc="right")
        entries = [line_handle("this router", **point), line_handle("permuted patches (range)", linewidth=5)]
        handles = [*entries, line_handle("untrained router", **ring)] if untrained else entries
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": 2})


def _table(axes: "Axes", values: np.ndarray, label: str, figure: "Figure", **scale: Any) -> None:
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
