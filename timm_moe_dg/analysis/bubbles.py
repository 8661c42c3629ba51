"""Accuracy against cost: what methods and models reach, and what a step of theirs takes (SF-MoE, Figure 1b)."""

import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..results.tables import Table
from .canvas import picture
from .drawing import fitted
from .palette import category_color


class Bubble(NamedTuple):
    """One method with one model.

    Attributes:
        name: Of both.
        seconds: Of a training step.
        memory: Peak in MiB; None where it was not measured.
        accuracy: Percent.
    """

    name: str
    seconds: float
    memory: float | None
    accuracy: float


def read_costs(path: Path) -> list[Mapping[str, Any]]:
    """Reads the rows of training steps that tools/benchmark_algorithms.py wrote.

    Raises:
        ArgumentError: The file cannot be read as such.
    """
    try:
        rows = json.loads(path.read_text())["rows"]
        return [row for row in rows if row["mode"] == "train" and row["model"] and row["algorithm"] and row["seconds"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = f"give what benchmark_algorithms.py --output wrote ({type(error).__name__}: {error})"
        raise ArgumentError.of("bubbles", str(path), remedy) from error


def bubbles_of(table: Table, costs: Sequence[Mapping[str, Any]], column: str) -> list[Bubble]:
    """Puts a column of a table and measured costs together, where both have a method with a model.

    Args:
        table: From `results.tables.make_tables`.
        costs: From `read_costs`.
        column: Title of a column.

    Raises:
        ArgumentError: There is no such column, or nothing that both have.
    """
    if column not in table.columns:
        raise ArgumentError.of("bubbles", column, f"the columns are: {', '.join(table.columns)}")
    of = {(row["algorithm"], row["model"]): row for row in costs}
    at, found = list(table.columns).index(column), []
    for row, cells in table.rows.items():
        cost = of.get((row.algorithm, row.model))
        if cost is not None and not isnan(cells[at].mean):
            found.append(Bubble(str(row), cost["seconds"], cost.get("peak_mib"), 100 * cells[at].mean))
    if not found:
        rows, measured = "; ".join(map(str, table.rows)), "; ".join(map(", ".join, of))
        raise ArgumentError.of("bubbles", column, f"no row has a cost; the rows are {rows}, measured were {measured}")
    return found


def plot_bubbles(bubbles: Sequence[Bubble], path: Path, column: str = "accuracy") -> None:
    """Draws accuracy against the time of a step; the area of a bubble is its peak memory.

    Args:
        bubbles: From `bubbles_of`.
        path: Picture to write.
        column: What the accuracy is.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    largest = max((bubble.memory or 0.0 for bubble in bubbles), default=0.0)
    with picture(path, 6.5, 4.2 + 0.24 * len(bubbles)) as figure:
        axes = figure.subplots()
        for number, (name, seconds, memory, accuracy) in enumerate(bubbles):
            area = 900 * memory / largest if memory and largest else 40
            label = name if memory is None else f"{name} ({memory:.0f} MiB)"
            color = category_color(number)
            axes.scatter(1e3 * seconds, accuracy, s=area, alpha=0.6, color=color, label=fitted(label, 60))
        axes.margins(0.2)
        axes.set(xlabel="ms per training step", ylabel=f"{column} (%)")
        legend = figure.legend(loc="outside lower center")
        for handle in legend.legend_handles:
            handle.set_sizes([40])  # type: ignore[union-attr] # of a scatter plot each is a collection
