"""Pictures of the two experiments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from timm_moe_dg.analysis.style import category_color, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[float]]

# Dashes tell the lines apart without color
STYLES = (("#000000", ":"), *zip(map(category_color, range(3)), ("-", "--", "-."), strict=True))


def plot_seed_curves(panels: Mapping[str, Sequence[Curves]], path: Path, labels: Mapping[str, str]) -> None:
    """Draws accuracy over epochs, up to three panels in a row: a thick line for the mean, a thin one for each seed.

    Args:
        panels: Title -> one entry per seed: name of a curve -> accuracy in percent after each epoch.
        path: Picture to write.
        labels: Name of a curve -> its label in the legend, in the legend's order.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with picture(path, 8.0, 1.2 + (3.4 if columns < 3 else 2.2) * rows) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for (title, seeds), axes in zip(panels.items(), grid.flat, strict=False):
            for (name, label), style in zip(labels.items(), STYLES, strict=False):
                values = np.array([curves[name] for curves in seeds])
                _mean_and_seeds(axes, np.arange(1, values.shape[1] + 1), values, label, style)
            axes.set_title(title)
            axes.set_ylim(-3, 103)
        for axes in grid[-1]:
            axes.set_xlabel("epoch")
        for axes in grid[:, 0]:
            axes.set_ylabel("accuracy (%)")
        handles, names = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=1 if columns < 3 else 2)


def plot_against_experts(
    panels: Mapping[str, Mapping[str, np.ndarray]], num_experts: Sequence[int], num_branches: int, path: Path
) -> None:
    """Draws quantities over the number of experts, one panel each: a thick line for the mean, a thin one for each seed.

    Args:
        panels: Label of the vertical axis -> label of a line -> (seeds, numbers of experts).
        num_experts: Values on the horizontal axis.
        num_branches: Marked by a vertical line.
        path: Picture to write.
    """
    with picture(path, 8.0, 4.2) as figure:
        for (quantity, lines), axes in zip(
            panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True
        ):
            for (label, values), style in zip(lines.items(), STYLES[1:], strict=False):
                _mean_and_seeds(axes, np.array(num_experts), values, label, style, marker="o")
            axes.axvline(num_branches, color="gray", linewidth=1, linestyle=":", label=f"N = M = {num_branches}")
            axes.set(xlabel="number of experts N", ylabel=quantity, xticks=num_experts)
            axes.set_ylim(bottom=0)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))


def _mean_and_seeds(
    axes: "Axes", x: np.ndarray, values: np.ndarray, label: str, style: tuple[str, str], marker: str | None = None
) -> None:
    color, dashes = style
    axes.plot(x, values.mean(0), color=color, linestyle=dashes, linewidth=2, label=label, marker=marker)
    if len(values) > 1:
        axes.plot(x, values.T, color=color, linestyle=dashes, linewidth=0.7, alpha=0.6)
