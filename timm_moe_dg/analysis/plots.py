"""Pictures of result tables: bars of accuracies, and lines of ablations."""

import re
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..errors import ArgumentError
from ..protocols.run_identity import in_effect
from ..results.runs import RowKey
from ..results.tables import Table
from .style import LETTER_WIDTH, Style, category_color, fitted, model_colors, picture, swatch, text_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_WIDTH = 10.0  # inches


def bars_of(cells: pd.DataFrame) -> tuple[list[float], list[float]]:
    """Returns means and standard errors in percent of cells of `Table.summary`.

    A missing mean is NaN, a missing error is 0.
    """
    return list(100 * cells["mean"]), list(100 * cells["error"].fillna(0.0))


def ablation_lines(table: Table, setting: str, column: str) -> dict[str, list[tuple[Any, pd.Series]]]:
    """Name of rows -> (value of a setting, such as "top_k", and the rows' cell of a column), in ascending order.

    A run that does not spell the setting out has its default. Rows without a counterpart of another value are left out.
    """
    if column not in table.columns:
        raise ArgumentError.of("ablation", column, f"the columns are: {', '.join(table.columns)}")
    cells = table.summary().xs(list(table.columns).index(column), level="column")
    lines: dict[str, list[tuple[Any, pd.Series]]] = {}
    for row in table.rows:
        values = in_effect(table.runs[row][0].args) if row in table.runs else {}
        if (value := values.get(setting)) is not None:
            spelled_out = re.escape(f"{setting}={value}")
            others = re.sub(rf"(^|, ){spelled_out}(?=, |$)", "", row.variant).removeprefix(", ")
            name = str(RowKey(row.algorithm, row.model, others))
            value = tuple(value) if isinstance(value, list) else value
            lines.setdefault(name, []).append((value, cells.loc[row]))
    several = {name: points for name, points in lines.items() if len({value for value, _ in points}) > 1}
    if not several:
        reason = "all rows have the same value" if lines else "no run has this setting"
        raise ArgumentError.of("ablation", setting, f"{reason}; give an option or model argument that differs")
    return {name: sorted(points, key=lambda point: _order(point[0])) for name, points in several.items()}


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers in their order, then everything else by its text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, str(value)


def plot_ablation(table: Table, setting: str, column: str, path: Path) -> None:
    """Draws a column of a table against an option or model argument, with standard errors, as in MoGE's Figure 2."""
    lines = ablation_lines(table, setting, column)
    values = sorted({value for points in lines.values() for value, _ in points}, key=_order)
    with picture(path, 6.0, 3.8 + 0.2 * len(lines)) as figure:
        axes = figure.subplots()
        for number, (name, points) in enumerate(lines.items()):
            means, errors = bars_of(pd.DataFrame([cell for _, cell in points]))
            positions, color = [values.index(value) for value, _ in points], category_color(number)
            axes.errorbar(positions, means, errors, marker="o", color=color, label=fitted(name, 60))
        axes.set_xticks(range(len(values)), map(str, values))
        axes.set(xlabel=setting, ylabel=f"{column} (%)", title=fitted(table.title, 60))
        figure.legend(loc="outside lower center")


def plot_accuracies(tables: Sequence[Table], path: Path) -> None:
    """Draws tables as bars with standard errors: a panel for each table, a group of bars for each column.

    A dotted line marks guessing if all runs have equally many classes. The legend counts the seeds of each row.
    """
    rows = sorted({row for table in tables for row in table.rows})
    colors = dict(zip(rows, model_colors([row.model for row in rows]), strict=True))
    width = min(max(6.0, 1.2 + 1.1 * max(len(table.columns) for table in tables)), MAX_WIDTH)
    legend = [fitted(f"{row} ({_seeds(tables, row)})", 60) for row in rows]
    line = text_size(width) / 50  # height of a line of text, inches
    below = [_column_titles(table, width) for table in tables]
    heights = [2.8 + (0.5 * line * max(map(len, titles)) if upright else line) for titles, upright in below]
    with picture(path, width, sum(heights) + 0.4 + line * len(legend)) as figure:
        panels = figure.subplots(len(tables), squeeze=False, height_ratios=heights)[:, 0]
        for table, axes, (titles, upright) in zip(tables, panels, below, strict=True):
            _bars(axes, table, colors)
            axes.set_xticks(range(len(titles)), titles, rotation=90 if upright else 0)
        handles = [swatch(colors[row], label) for row, label in zip(rows, legend, strict=True)]
        figure.legend(handles=handles, loc="outside lower center")


def _column_titles(table: Table, width: float) -> tuple[list[str], bool]:
    """The labels below the bars, and whether lack of room turns them upright."""
    letters = int(72 * (width - 1.5) / len(table.columns) / (LETTER_WIDTH * text_size(width)))
    upright = max(map(len, table.columns)) > letters
    return [fitted(title, 24) if upright else title for title in table.columns], upright


def chance(table: Table) -> float:
    """The accuracy of guessing in percent; NaN if the runs differ in their number of classes, or do not record it."""
    classes = {run.args.get("num_classes") for runs in table.runs.values() for run in runs}
    number = classes.pop() if len(classes) == 1 else None  # DomainBed's records have none
    return 100 / number if number else float("nan")


def _seeds(tables: Sequence[Table], row: RowKey) -> str:
    numbers = {n for table in tables if row in table.rows for n in table.summary().loc[row].seeds if n} or {0}
    low, high = min(numbers), max(numbers)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"


def _bars(axes: "Axes", table: Table, colors: Mapping[RowKey, str]) -> None:
    guessed = chance(table)
    above = 1.0 if isnan(guessed) else guessed + 1.0  # so that the line of chance does not cross the text
    width, summary = 0.8 / max(len(table.rows), 1), table.summary()
    for number, row in enumerate(sorted(table.rows)):
        heights, errors = bars_of(summary.loc[row])
        centers = np.arange(len(heights)) + (number - (len(table.rows) - 1) / 2) * width
        axes.bar(centers, heights, width, yerr=errors, color=colors[row])
        for center, height in zip(centers, heights, strict=True):
            if np.isnan(height):
                style: Style = {"rotation": 90, "ha": "center", "va": "bottom", "size": "small", "color": colors[row]}
                axes.text(center, above, "missing", **style)
    if not isnan(guessed):
        axes.axhline(guessed, color="black", linestyle=":", linewidth=1.2)
        # Right of the axes, at the height of the line
        words, place = f"chance\n{guessed:.1f}", axes.get_yaxis_transform()
        axes.text(1.01, guessed, words, transform=place, va="center", size="small")
    axes.set(ylabel="accuracy (%)", ylim=(0, 100), title=fitted(table.title, 60))
