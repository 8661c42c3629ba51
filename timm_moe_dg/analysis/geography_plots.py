"""The domains that a MoGE model discovered, as a map: who answers where, and where the model has been trained at all.

Coastlines are Natural Earth's (see coastlines.md). Everything is drawn in degrees, so that a cell is a rectangle.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..layers import Coverage, thin_coordinates
from ..layers.encoders.coverage import distances
from .geography import DomainMap, ExpertMatrix, ExpertUsage
from .map_labels import Box, beside, extent
from .style import LEGEND_BELOW, SHARED_COLOR, Style, expert_color, picture, swatch, text_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 1000.0  # km to the nearest training coordinate, from which on a cell is pale where the model routes it anyway
VEIL = 0.7  # opacity of the white over them
WORLD = (-180.0, 180.0, -90.0, 90.0)
_COAST, _INK = "#404040", "#000000"
_KM = 111.2  # per degree
WIDTH = 6.4  # inches
_COLUMNS = 5  # of the legend
EVEN: Style = {"color": "black", "linestyle": ":", "linewidth": 1}
SELECTED = 0.4  # opacity of the bars that say how often an expert is selected


def plot_domain_map(
    domains: DomainMap,
    path: Path,
    places: Mapping[str, Tensor] | None = None,
    held_out: Mapping[str, Tensor] | None = None,
) -> None:
    """Draws discovered domains as a map; cells far from all training coordinates are pale, or nobody's if not routed.

    Args:
        domains: From `domain_map`.
        path: Picture to write.
        places: Name of a group -> (N, 2) coordinates of images, drawn as points.
        held_out: The same of groups that were not trained on, drawn as an outline.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    used = domains.experts[domains.experts >= 0].unique().tolist()
    with picture(path, WIDTH, 4.1 + 0.25 * math.ceil(len(used) / _COLUMNS)) as figure:
        axes = figure.subplots()
        note = _draw_cells(axes, domains)
        for line in coastlines():
            axes.plot(*line.T, color=_COAST, linewidth=0.5)
        _draw_groups(axes, domains, _known(places or {}), _known(held_out or {}))
        axes.set(xlim=WORLD[:2], ylim=WORLD[2:], aspect="equal")
        _label_axes(axes)
        axes.set_title(f"Discovered domains: routed expert with the largest weight{note}")
        handles = [swatch(expert_color(index), f"expert {index}") for index in used]
        columns = max(1, min(len(used), _COLUMNS))
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": columns}, handlelength=1.2)


def _draw_groups(
    axes: "Axes", domains: DomainMap, groups: Mapping[str, np.ndarray], outside: Mapping[str, np.ndarray]
) -> None:
    """Draws images as points, outlines what was not trained on, and writes the names beside both."""
    for rows in groups.values():
        axes.plot(*rows.T, "o", color=_INK, markersize=1.4, markeredgewidth=0)
    _draw_outlines(axes, domains, list(outside.values()))
    boxes = {name: extent(rows) for name, rows in groups.items()}
    boxes |= {f"{name} (held out)": extent(rows, margin=_margin(domains)) for name, rows in outside.items()}
    _draw_names(axes, boxes)


def coastlines() -> list[np.ndarray]:
    """Returns the world's coastlines, each (N, 2) longitude and latitude in degrees."""
    with np.load(Path(__file__).with_name("coastlines.npz")) as file:
        return np.split(file["points"] / 100.0, file["ends"][:-1])


def _draw_cells(axes: "Axes", domains: DomainMap) -> str:
    """Colors the cells; returns what is to be said about those that are pale or white."""
    from matplotlib.colors import ListedColormap

    experts = domains.experts.numpy()
    pale = np.zeros(experts.shape, bool) if domains.distance is None else domains.distance.numpy() > FAR
    pale &= experts >= 0
    edges = [_edges(values) for values in (domains.longitude, domains.latitude)]
    colors = ListedColormap([SHARED_COLOR, *map(expert_color, range(domains.num_experts))])
    axes.pcolormesh(*edges, experts, cmap=colors, vmin=-1.5, vmax=domains.num_experts - 0.5)
    veil = np.stack([*np.ones((3, *pale.shape)), np.where(pale, VEIL, 0.0)], axis=-1)
    axes.imshow(veil, extent=WORLD, origin="lower", interpolation="nearest", zorder=1.5)
    notes = [f"pale: more than {FAR:,.0f} km from all training images"] if pale.any() else []
    if domains.radius is not None:
        notes.append(f"white: the shared expert alone, more than {domains.radius:,.0f} km from all training images")
    return "".join(f"\n{note}" for note in notes)


def _draw_outlines(axes: "Axes", domains: DomainMap, regions: Sequence[np.ndarray]) -> None:
    """Surrounds each region at a distance that the map's cells can resolve."""
    across, up = np.meshgrid(domains.longitude.numpy(), domains.latitude.numpy())
    cells = torch.from_numpy(np.stack([across.ravel(), up.ravel()], axis=1))
    for rows in regions:
        points = thin_coordinates(torch.from_numpy(rows)).points
        distance = distances(Coverage(len(points)).hold(points), cells).numpy().reshape(across.shape)
        away = _margin(domains) * _KM
        for width, color, style in ((2.4, SHARED_COLOR, "solid"), (1.2, _INK, "dashed")):
            axes.contour(across, up, distance, [away], colors=color, linewidths=width, linestyles=style)


def _margin(domains: DomainMap) -> float:
    """How far an outline is from what it surrounds: one and a half cells, in degrees."""
    return 1.5 * 180.0 / len(domains.latitude)


def _draw_names(axes: "Axes", groups: Mapping[str, Box]) -> None:
    from matplotlib.patheffects import withStroke

    taken = list(groups.values())
    for name, group in groups.items():
        box = beside(group, name, taken, text_size(WIDTH))
        taken.append(box)
        halo = [withStroke(linewidth=2.0, foreground="white")]
        axes.text(*box.center, name, ha="center", va="center", path_effects=halo, clip_on=True)


def _label_axes(axes: "Axes") -> None:
    axes.set_xticks(range(-180, 181, 60))
    axes.set_yticks(range(-90, 91, 30))
    axes.set(xlabel="longitude (degrees)", ylabel="latitude (degrees)")


def _known(groups: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The known coordinates of each group that has any."""
    known = {name: lonlat[~lonlat.isnan().any(dim=1)].numpy() for name, lonlat in groups.items()}
    return {name: rows for name, rows in known.items() if len(rows)}


def _edges(centers: Tensor) -> np.ndarray:
    half = (centers[1] - centers[0]) / 2 if len(centers) > 1 else centers.new_tensor(45.0)
    return np.append((centers - half).numpy(), float(centers[-1] + half))


def plot_expert_usage(usage: ExpertUsage, path: Path) -> None:
    """Draws, per mixture layer, how often each expert has the largest weight and how often it is selected.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    layers, num_experts = usage.frequency.shape
    across = min(layers, 2)
    down = -(-layers // across)
    with picture(path, max(3.4, 0.26 * num_experts) * across + 1.0, 3.0 * down + 0.8) as figure:
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flat
        for index, axes in enumerate(list(panels)[:layers]):
            _usage_bars(axes, usage.frequency[index], usage.selected[index])
            axes.set_title(f"block {usage.blocks[index]}" if usage.blocks else f"mixture layer {index}")
        for axes in figure.axes[layers:]:
            axes.remove()
        figure.supylabel(f"share of {usage.num_routed} images", size="medium")
        for axes in figure.axes[-across:]:
            axes.set_xlabel("expert")
        solid, pale = swatch("#555555", "largest weight"), swatch("#555555", "among the selected")
        pale.set_alpha(SELECTED)
        even = figure.axes[0].axhline(1 / num_experts, **EVEN, label="even use")
        figure.legend(handles=[solid, pale, even], **{**LEGEND_BELOW, "ncols": across + 1})


def _usage_bars(axes: "Axes", frequency: Tensor, selected: Tensor) -> None:
    positions, colors = np.arange(len(frequency)), _colors(len(frequency))
    axes.bar(positions - 0.2, frequency, 0.4, color=colors)
    axes.bar(positions + 0.2, selected, 0.4, color=colors, alpha=SELECTED)
    axes.axhline(1 / len(frequency), **EVEN)
    step = -(-len(frequency) // 8)  # numbers that there is room for
    axes.set(xticks=positions[::step])


def plot_expert_matrix(matrix: ExpertMatrix, path: Path) -> None:
    """Draws the accuracy of each forced expert (column) on the samples of each discovered domain (row).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    columns = np.column_stack([matrix.routed.numpy(), matrix.accuracy.numpy()])
    with picture(path, 2.6 + 0.62 * columns.shape[1], 1.5 + 0.5 * len(columns)) as figure:
        axes = figure.subplots()
        image = axes.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(columns):
            if not np.isnan(value):
                color = "white" if value < 0.6 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        axes.axvline(0.5, color="white", linewidth=3)
        axes.set_xticks(range(columns.shape[1]), ["routed", *map(str, range(len(columns)))])
        axes.set_yticks(range(len(columns)), [f"{at} (n={n})" for at, n in enumerate(matrix.num_samples.tolist())])
        axes.set(xlabel="expert forced on all", ylabel="discovered domain")
        figure.colorbar(image, label="accuracy")


def _colors(num_experts: int) -> list[str]:
    return [expert_color(index) for index in range(num_experts)]
