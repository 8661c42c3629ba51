"""Pictures of tables: parts and attributes against experts, and statistics against their null distributions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..canvas import new_figure
from ..drawing import fitted, write_figure
from .association import PermutationTest
from .parts import Association

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_LIFT = 8.0  # where the color scale ends
ROWS_WITH_NUMBERS = 40


def plot_association(found: Association, title: str, path: Path) -> None:
    """Draws a table twice: shares of each row, and lift over independence; rows without counts are hatched.

    Args:
        found: Rows against experts.
        title: What the rows are.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows, experts = found.shares.shape
    figure = new_figure(2.4 + 2 * max(1.0, 0.36 * experts), 1.4 + 0.24 * rows)
    left, right = figure.subplots(1, 2, sharey=True)
    _table(left, found.shares.numpy(), "share of the row", figure, cmap="cividis", vmin=0, vmax=1)
    with np.errstate(divide="ignore"):
        doubled = np.log2(found.lift.numpy()).clip(-np.log2(LARGEST_LIFT), np.log2(LARGEST_LIFT))
    bound = np.log2(LARGEST_LIFT)
    _table(right, doubled, "log2 of the lift", figure, cmap="PuOr_r", vmin=-bound, vmax=bound)
    left.set_yticks(range(rows), [fitted(name, 30) for name in found.rows], size=7)
    strength = "undefined" if np.isnan(found.cramers_v) else f"{found.cramers_v:.3f}"
    numbers = f"NMI {found.nmi.value:.3f} (p {found.nmi.p:.3g}), Cramer's V {strength}"
    figure.suptitle(f"{fitted(title, 40)}\n{numbers}", size=9)
    write_figure(figure, path)


def plot_nulls(tests: Mapping[str, PermutationTest], label: str, path: Path) -> None:
    """Draws statistics as points beside the whole range of their nulls.

    Args:
        tests: Name -> test.
        label: What the statistic is.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    names: Sequence[str] = list(tests)
    figure = new_figure(5.0, 0.9 + 0.28 * len(names))
    axes = figure.subplots()
    for row, test in enumerate(tests.values()):
        low, high = float(test.null.min()), float(test.null.max())
        axes.plot([low, high], [row, row], color="#808080", linewidth=5, solid_capstyle="butt")
        axes.plot(test.value, row, "o", color="#D55E00", markersize=5)
    axes.set_yticks(range(len(names)), [fitted(name, 34) for name in names], size=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel=f"{label}; gray: range under permuted patches")
    axes.xaxis.label.set_fontsize(8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def _table(axes: "Axes", values: np.ndarray, label: str, figure: "Figure", **scale: Any) -> None:
    axes.set_facecolor("white")
    axes.patch.set(hatch="///", edgecolor="silver")
    drawn = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **scale)
    if len(values) <= ROWS_WITH_NUMBERS and values.shape[1] <= 16:
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if _is_dark(drawn, value) else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", size=6, color=color)
    axes.set_xticks(range(values.shape[1]), map(str, range(values.shape[1])), size=7)
    axes.set_xlabel("expert", size=8)
    bar = figure.colorbar(drawn, ax=axes, orientation="horizontal", aspect=20, fraction=0.05)
    bar.set_label(label, size=7)
    bar.ax.tick_params(labelsize=6)


def _is_dark(drawn: Any, value: float) -> bool:
    red, green, blue, _ = drawn.cmap(drawn.norm(value))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
