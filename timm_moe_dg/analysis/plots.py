"""Pictures of results: tables as bars, ablations as lines, and what mixtures cost."""

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..protocols.run_identity import settings
from ..results.columns import Cell
from ..results.runs import RowKey
from ..results.tables import Table
from .canvas import DPI, new_figure, swatch


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
    figure = new_figure(9.0, 3.8)
    axes = figure.subplots(1, 2, sharey=True)
    compared = [row for row in rows if row["against"] != row["model"]]
    for panel, quantity, other in zip(axes, ("num_experts", "batch_size"), ("batch_size", "num_experts"), strict=True):
        lines: dict[str, list[tuple[int, Sequence[float]]]] = {}
        for row in compared:
            values = {**row["options"], "batch_size": row["batch_size"]}
            fixed = f", {other} {values[other]}" if other in values else ""
            if quantity in values:
                name = f"{row['model']} {row['mode']} / {row['against']}{fixed}"
                lines.setdefault(name, []).append((values[quantity], row["ratio"]))
        for name, points in lines.items():
            at, ratios = zip(*sorted(points), strict=True)
            low, middle, high = np.array(ratios).T
            panel.errorbar(at, middle, [middle - low, high - middle], marker="o", capsize=2, label=name)
        ticks = sorted({at for points in lines.values() for at, _ in points})
        panel.set(xlabel=quantity.replace("_", " "), xscale="log")
        panel.set_xticks(ticks, map(str, ticks))
        panel.minorticks_off()
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        if lines:
            panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=7, frameon=False)
    axes[0].set_ylabel("time over the dense model's")
    figure.savefig(path, dpi=DPI)


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
    axes = (figure := new_figure(6.0, 3.8)).subplots()
    values = sorted({value for points in lines.values() for value, _ in points})
    for name, points in lines.items():
        means = [100 * cell.mean for _, cell in points]
        errors = [0.0 if isnan(cell.error) else 100 * cell.error for _, cell in points]
        places = [values.index(value) for value, _ in points]
        axes.errorbar(places, means, errors, marker="o", capsize=2, label=name)
    axes.set_xticks(range(len(values)), map(str, values))
    axes.set(xlabel=setting, ylabel=f"{column} (%)", title=table.title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=DPI)


def plot_accuracies(tables: Sequence[Table], path: Path) -> None:
    """Draws tables of results as bars, one panel a table, one group of bars a column, with standard errors.

    Args:
        tables: From `results.tables.make_tables`; at least one.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows = sorted({row for table in tables for row in table.rows})
    width = 0.8 / len(rows)
    figure = new_figure(max(6.0, 1.2 + 1.1 * max(len(table.columns) for table in tables)), 0.6 + 3.0 * len(tables))
    for table, axes in zip(tables, figure.subplots(len(tables), squeeze=False)[:, 0], strict=True):
        for number, (row, bars) in enumerate(sorted(bars_of(table).items())):
            places = np.arange(len(bars.heights)) + (number - (len(table.rows) - 1) / 2) * width
            color = f"C{rows.index(row)}"
            axes.bar(places, bars.heights, width, yerr=bars.errors, capsize=2, color=color)
            for place, height in zip(places, bars.heights, strict=True):
                if np.isnan(height):
                    axes.text(place, 1.0, "missing", rotation=90, ha="center", va="bottom", size=7, color=color)
        axes.set_xticks(range(len(table.columns)), table.columns)
        axes.set(ylabel="accuracy (%)", ylim=(0, 100), title=table.title)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [swatch(f"C{number}", str(row)) for number, row in enumerate(rows)]
    figure.legend(handles=handles, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=DPI)
