"""Pictures of what a MoGE model does: its discovered domains on a map, expert usage, forced experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .canvas import DPI, new_figure, swatch
from .domains import DomainMap
from .experts import ExpertMatrix, ExpertUsage
from .palette import expert_color

if TYPE_CHECKING:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

SELECTED = 0.4  # opacity of the bars that say how often an expert is selected


def plot_domain_map(domains: DomainMap, path: Path, places: Mapping[str, Tensor] | None = None) -> None:
    """Draws discovered domains as a map, with coastlines where cartopy is installed.

    Args:
        domains: From `domain_map`.
        path: Picture to write.
        places: Name of a group -> (N, 2) coordinates, outlined and labeled on top.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure(9.0, 4.8)
    axes = _world_axes(figure)
    used = [index for index in range(domains.num_experts) if (domains.experts == index).any()]
    edges = [_edges(values) for values in (domains.longitude, domains.latitude)]
    colors, num_experts = _colors(domains.num_experts), domains.num_experts
    axes.pcolormesh(*edges, domains.experts.numpy(), cmap=_color_map(colors), vmin=-0.5, vmax=num_experts - 0.5)
    for name, lonlat in (places or {}).items():
        axes.plot(*lonlat.T.numpy(), ".", color="black", markersize=1.0, alpha=0.35)
        middle = lonlat.double().mean(0).tolist()
        axes.text(*middle, name, ha="center", va="center", bbox={"facecolor": "white", "alpha": 0.8, "lw": 0}, size=8)
    axes.set(xlim=(-180, 180), ylim=(-90, 90), xlabel="longitude (degrees)", ylabel="latitude (degrees)")
    axes.set_title("Discovered domains: routed expert with the largest weight")
    handles = [swatch(colors[index], f"expert {index}") for index in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False)
    figure.savefig(path, dpi=DPI)


def plot_expert_usage(usage: ExpertUsage, path: Path) -> None:
    """Draws, per mixture layer, how often each expert has the largest weight and how often it is selected.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    layers, num_experts = usage.frequency.shape
    figure = new_figure(4.2 * layers, 3.4)
    for index, axes in enumerate(figure.subplots(1, layers, sharey=True, squeeze=False)[0]):
        positions = np.arange(num_experts)
        colors = _colors(num_experts)
        axes.bar(positions - 0.2, usage.frequency[index], 0.4, color=colors)
        axes.bar(positions + 0.2, usage.selected[index], 0.4, color=colors, alpha=SELECTED)
        axes.axhline(1 / num_experts, color="black", linestyle=":", linewidth=1)
        axes.set(xticks=positions, xlabel="expert", title=f"Mixture layer {index}", ylim=(0, 1.05))
    figure.axes[0].set_ylabel(f"share of {usage.num_routed} routed images")
    solid, pale = swatch("black", "largest weight"), swatch("black", "selected")
    pale.set_alpha(SELECTED)
    figure.axes[-1].legend(handles=[solid, pale], frameon=False)
    figure.savefig(path, dpi=DPI)


def plot_expert_matrix(matrix: ExpertMatrix, path: Path) -> None:
    """Draws the accuracy of each forced expert (column) on the samples of each discovered domain (row).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    columns = np.column_stack([matrix.routed.numpy(), matrix.accuracy.numpy()])
    figure = new_figure(1.4 + 0.75 * columns.shape[1], 1.2 + 0.6 * len(columns))
    axes = figure.subplots()
    image = axes.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(columns):
        if not np.isnan(value):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
    axes.axvline(0.5, color="white", linewidth=3)
    axes.set_xticks(range(columns.shape[1]), ["routed", *map(str, range(len(columns)))])
    rows = [f"{index} (n={number})" for index, number in enumerate(matrix.num_samples.tolist())]
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="expert forced on all", ylabel="discovered domain")
    figure.colorbar(image, label="accuracy")
    figure.savefig(path, dpi=DPI)


def _world_axes(figure: "Figure") -> Any:  # cartopy's axes have no types
    try:
        from cartopy.crs import PlateCarree
    except ImportError:
        return figure.subplots()
    axes = figure.add_subplot(projection=PlateCarree())
    axes.coastlines()
    return axes


def _colors(num_experts: int) -> list[str]:
    return [expert_color(index) for index in range(num_experts)]


def _color_map(colors: list[str]) -> "ListedColormap":
    from matplotlib.colors import ListedColormap

    return ListedColormap(colors)


def _edges(centers: Tensor) -> np.ndarray:
    half = (centers[1] - centers[0]) / 2 if len(centers) > 1 else centers.new_tensor(45.0)
    return np.append((centers - half).numpy(), float(centers[-1] + half))
