"""Pictures of results: tables as bars, ablations as lines, and what mixtures cost."""

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..protocols.run_identity import settings
from ..results.columns import Cell
from ..results.runs import RowKey
from ..results.tables import Table
from .canvas import Style, line_handle, picture, swatch, text_size
from .drawing import LETTER, fitted
from .palette import category_color, model_colors

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MARKERS = "os^Dvpx*"
DASHES = {"train": "-", "inference": "--"}
WIDEST = 10.0  # inches


class Bars(NamedTuple):
    """The bars of one row of a table.

    Attributes:
        heights: Mean of each column in percent; NaN where it is missing.
        errors: Standard errors in percent; 0 where there is none.
    """

    heights: list[float]
    errors: list[float]


def plot_cost(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the cost of mixture layers over dense models, against the number of experts and the batch size.

    Args:
        rows: Of `tools/benchmark.py`: "model", "against", "mode", "batch_size", "options", "ratio" (three quartiles).
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    compared = [row for row in rows if row["against"] != row["model"]]
    pairs = list(dict.fromkeys((row["model"], row["against"]) for row in compared))
    colors = dict(zip(pairs, model_colors([model for model, _ in pairs]), strict=True))
    with picture(path, 7.5, 4.0 + 0.2 * (len(pairs) + 4)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        fixed = _cost_panel(left, compared, "num_experts", "batch_size", colors)
        fixed |= _cost_panel(right, compared, "batch_size", "num_experts", colors)
        left.set_ylabel("time over the dense model's")
        handles: list[Artist] = [swatch(colors[pair], f"{pair[0]} / {pair[1]}") for pair in pairs]
        modes = [mode for mode in DASHES if any(row["mode"] == mode for row in compared)]
        handles += [line_handle(mode, linestyle=DASHES[mode]) for mode in modes]
        handles += [line_handle(label, marker=marker, linestyle="none") for label, marker in fixed.items()]
        figure.legend(handles=handles, loc="outside lower center")


def _cost_panel(
    panel: "Axes", rows: Sequence[Mapping[str, Any]], quantity: str, other: str, colors: Mapping[tuple[str, str], str]
) -> dict[str, str]:
    """Draws ratios against one quantity: colors are models, dashes are modes, markers values of the other quantity.

    Returns:
        What the markers stand for -> marker.
    """
    lines: dict[tuple[str, str, str, Any], list[tuple[int, Sequence[float]]]] = {}
    for row in rows:
        values = {**row["options"], "batch_size": row["batch_size"]}
        if quantity in values:
            key = (row["model"], row["against"], row["mode"], values.get(other))
            lines.setdefault(key, []).append((values[quantity], row["ratio"]))
    fixed = sorted({key[3] for key in lines if key[3] is not None})
    markers = {value: MARKERS[at % len(MARKERS)] for at, value in enumerate(fixed)}
    for (model, against, mode, value), points in lines.items():
        at, ratios = zip(*sorted(points), strict=True)
        low, middle, high = np.array(ratios).T
        style: Style = {"color": colors[model, against], "linestyle": DASHES[mode], "marker": markers.get(value, "o")}
        panel.errorbar(at, middle, [middle - low, high - middle], **style)
    ticks = sorted({at for points in lines.values() for at, _ in points})
    panel.set(xlabel=quantity.replace("_", " "), xscale="log")
    panel.set_xticks(ticks, map(str, ticks))
    panel.minorticks_off()
    panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    return {f"{other.replace('_', ' ')} {value}": marker for value, marker in markers.items()}


def bars_of(table: Table) -> dict[RowKey, Bars]:
    """Returns the bars of a table by row, one per column."""
    return {
        row: Bars(
            [100 * cell.mean for cell in cells], [0.0 if isnan(cell.error) else 100 * cell.error for cell in cells]
        )
        for row, cells in table.rows.items()
    }


def ablation_lines(table: Table, setting: str, column: str) -> dict[str, list[tuple[Any, Cell]]]:
    """Sorts one column of a table by a setting that tells its rows apart, such as "top_k".

    Returns:
        Points (value of the setting, cell) in ascending order, by what the rows of a line have in common.

    Raises:
        ArgumentError: There is no such column, or no row was run with such a setting.
    """
    if column not in table.columns:
        raise ArgumentError.of("ablation", column, f"the columns are: {', '.join(table.columns)}")
    lines: dict[str, list[tuple[Any, Cell]]] = {}
    for row, cells in table.rows.items():
        value = settings(table.runs[row][0].args).get(setting) if row in table.runs else None
        if value is not None:
            kept = [part for part in row.variant.split(", ") if part and not part.startswith(f"{setting}=")]
            name = str(RowKey(row.algorithm, row.model, ", ".join(kept)))
            lines.setdefault(name, []).append((value, cells[list(table.columns).index(column)]))
    if not lines:
        raise ArgumentError.of("ablation", setting, "no run has this setting; settings are options and model_kwargs")
    return {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}


def plot_ablation(table: Table, setting: str, column: str, path: Path) -> None:
    """Draws a column of a table against a setting, with standard errors, as MoGE's Figure 2 does.

    Args:
        table: From `results.tables.make_tables`.
        setting: Name of an option or of a model's argument.
        column: Title of a column.
        path: Picture to write.

    Raises:
        ArgumentError: See `ablation_lines`.
        MissingDependencyError: matplotlib is not installed.
    """
    lines = ablation_lines(table, setting, column)
    values = sorted({value for points in lines.values() for value, _ in points})
    with picture(path, 6.0, 3.8 + 0.2 * len(lines)) as figure:
        axes = figure.subplots()
        for number, (name, points) in enumerate(lines.items()):
            means = [100 * cell.mean for _, cell in points]
            errors = [0.0 if isnan(cell.error) else 100 * cell.error for _, cell in points]
            places, color = [values.index(value) for value, _ in points], category_color(number)
            axes.errorbar(places, means, errors, marker="o", color=color, label=fitted(name, 60))
        axes.set_xticks(range(len(values)), map(str, values))
        axes.set(xlabel=setting, ylabel=f"{column} (%)", title=fitted(table.title, 60))
        figure.legend(loc="outside lower center")


def plot_accuracies(tables: Sequence[Table], path: Path) -> None:
    """Draws tables of results as bars, one panel a table, one group of bars a column, with standard errors.

    A dotted line is the accuracy of guessing, where all runs have the same number of classes; the legend says of how
    many seeds bars are means.

    Args:
        tables: From `results.tables.make_tables`; at least one.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows = sorted({row for table in tables for row in table.rows})
    colors = dict(zip(rows, model_colors([row.model for row in rows]), strict=True))
    width = min(max(6.0, 1.2 + 1.1 * max(len(table.columns) for table in tables)), WIDEST)
    legend = [fitted(f"{row} ({_seeds(tables, row)})", 60) for row in rows]
    line = text_size(width) / 50  # inches
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
    """Titles as they are written below the bars, and whether they stand upright for lack of room."""
    letters = int(72 * (width - 1.5) / len(table.columns) / (LETTER * text_size(width)))
    upright = max(map(len, table.columns)) > letters
    return [fitted(title, 24) if upright else title for title in table.columns], upright


def chance(table: Table) -> float:
    """Percent that guessing gets right in a table; NaN where its runs differ in their classes, or do not say."""
    classes = {run.args.get("num_classes") for runs in table.runs.values() for run in runs}
    number = classes.pop() if len(classes) == 1 else None
    return 100 / number if number else float("nan")


def _seeds(tables: Sequence[Table], row: RowKey) -> str:
    """Of how many trial seeds the cells of a row are means."""
    numbers = {len(cell.values) for table in tables for cell in table.rows.get(row, ()) if cell.values} or {0}
    low, high = min(numbers), max(numbers)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"


def _bars(axes: "Axes", table: Table, colors: Mapping[RowKey, str]) -> None:
    width = 0.8 / max(len(table.rows), 1)
    for number, (row, bars) in enumerate(sorted(bars_of(table).items())):
        places = np.arange(len(bars.heights)) + (number - (len(table.rows) - 1) / 2) * width
        axes.bar(places, bars.heights, width, yerr=bars.errors, color=colors[row])
        for place, height in zip(places, bars.heights, strict=True):
            if np.isnan(height):
                axes.text(place, 1.0, "missing", rotation=90, ha="center", va="bottom", size="small", color=colors[row])
    if not isnan(guessed := chance(table)):
        axes.axhline(guessed, color="black", linestyle=":", linewidth=1.2)
        axes.text(
            1.01, guessed, f"chance\n{guessed:.1f}", transform=axes.get_yaxis_transform(), va="center", size="small"
        )
    axes.set(ylabel="accuracy (%)", ylim=(0, 100), title=fitted(table.title, 60))
