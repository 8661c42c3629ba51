"""Pictures of what a MoGE model's experts do: how often each is chosen, and how good each is where it is forced."""

from pathlib import Path

import numpy as np

from .canvas import DPI, new_figure, swatch
from .experts import ExpertMatrix, ExpertUsage
from .palette import expert_color

SELECTED = 0.4  # opacity of the bars that say how often an expert is selected


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


def _colors(num_experts: int) -> list[str]:
    return [expert_color(index) for index in range(num_experts)]
