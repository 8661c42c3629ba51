"""Pictures of what a MoGE model's experts do: how often each is chosen, and how good each is where it is forced."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from .canvas import LEGEND_BELOW, Style, picture, swatch
from .experts import ExpertMatrix, ExpertUsage
from .palette import expert_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVEN: Style = {"color": "black", "linestyle": ":", "linewidth": 1}
SELECTED = 0.4  # opacity of the bars that say how often an expert is selected


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
