"""Pictures of tables: parts and attributes against experts, and statistics against their null distributions."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..canvas import styled, text_size
from ..drawing import fitted, write_figure
from ..palette import category_color
from .association import PermutationTest
from .parts import Association

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_LIFT = 8.0  # where the color scale ends
ROWS_WITH_NUMBERS = 40
CELL, NUMBER = 0.36, 8.0  # inches of a column, and points of the numbers that fit into it


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
    names = [fitted(name, 30) for name in found.rows]
    width = 3.0 + 2 * max(1.4, CELL * experts)
    height = max(0.28, text_size(width) / 52) * sum(name.count("\n") + 1 for name in names)
    strength = "undefined" if np.isnan(found.cramers_v) else f"{found.cramers_v:.3f}"
    numbers = f"NMI {found.nmi.value:.3f} (p {found.nmi.p:.3g}), Cramer's V {strength}"
    bound = np.log2(LARGEST_LIFT)
    with np.errstate(divide="ignore"):
        doubled = np.log2(found.lift.numpy()).clip(-bound, bound)
    with styled(width, 2.2 + height) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _table(left, found.shares.numpy(), "share of the row", figure, cmap="cividis", vmin=0, vmax=1)
        _table(right, doubled, "log2 of the lift", figure, cmap="PuOr_r", vmin=-bound, vmax=bound)
        left.set_yticks(range(rows), names)
        figure.suptitle(f"{fitted(title, 40)}\n{numbers}")
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
    names = [fitted(name, 34) for name in tests]
    with styled(6.0, 1.1 + 0.26 * sum(name.count("\n") + 1 for name in names)) as figure:
        axes = figure.subplots()
        for row, test in enumerate(tests.values()):
            low, high = float(test.null.min()), float(test.null.max())
            axes.plot([low, high], [row, row], color="#808080", linewidth=5, solid_capstyle="butt")
            axes.plot(test.value, row, "o", color=category_color(1), markersize=6)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(f"{label}; gray: range under permuted patches", loc="right")
        write_figure(figure, path)


def _table(axes: "Axes", values: np.ndarray, label: str, figure: "Figure", **scale: Any) -> None:
    axes.set_facecolor("white")
    axes.patch.set(hatch="///", edgecolor="silver")
    drawn = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **scale)
    if len(values) <= ROWS_WITH_NUMBERS and values.shape[1] <= 16:
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if _is_dark(drawn, value) else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", size=NUMBER, color=color)
    steps = range(0, values.shape[1], -(-values.shape[1] // 16))
    axes.set_xticks(steps, map(str, steps))
    axes.set_xlabel("expert")
    bar = figure.colorbar(drawn, ax=axes, orientation="horizontal", aspect=20, fraction=0.05)
    bar.set_label(label)


def _is_dark(drawn: Any, value: float) -> bool:
    red, green, blue, _ = drawn.cmap(drawn.norm(value))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
