"""Picture of what mixtures cost beside dense models: a panel for each of these, a line for each setting."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .style import LEGEND_BELOW, category_color, fitted, line_handle, picture

Row = Mapping[str, Any]
MARKERS = "os^Dvpx*"
_SIZES = ("num_experts", "top_k", "img_size", "batch_size")
_CONDITIONS = ("model", "mode", "dtype", "program", "dispatch")
_WORDS = {"num_experts": "experts", "top_k": "experts per item", "img_size": "pixels", "batch_size": "batch"}


def plot_cost(rows: Sequence[Row], path: Path) -> None:
    """Draws times over dense models' against the first of experts, K, pixels and batch size that was varied.

    What else was varied tells the lines apart.

    Args:
        rows: Of `tools/benchmark.py`: "model", "against", "options", its conditions, "ratio" (three quartiles).
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    compared = [row for row in rows if row["against"] != row["model"]]
    varied = [name for name in (*_SIZES, *_CONDITIONS) if len({_value(row, name) for row in compared}) > 1]
    quantity = next((name for name in varied if name in _SIZES), "batch_size")
    others = [name for name in varied if name != quantity]
    panels = list(dict.fromkeys(row["against"] for row in compared))
    lines = list(dict.fromkeys(_label(row, others) for row in compared))
    looks = {line: {"color": category_color(at), "marker": MARKERS[at % len(MARKERS)]} for at, line in enumerate(lines)}
    with picture(path, max(3.6 * len(panels), 5.0), 3.6 + 0.25 * -(-len(lines) // 2)) as figure:
        for panel, against in zip(np.ravel(figure.subplots(1, len(panels), sharey=True)), panels, strict=True):
            panel.set_title(fitted(f"over the {against}" if " " in against or "-" in against else against, 30))
            for line, look in looks.items():
                own = [row for row in compared if row["against"] == against and _label(row, others) == line]
                points = sorted((_value(row, quantity), *row["ratio"]) for row in own)
                at, low, middle, high = np.array(points, dtype=float).T
                panel.errorbar(at, middle, [middle - low, high - middle], **look)
            ticks = sorted({_value(row, quantity) for row in compared})
            panel.set(xlabel=_WORDS[quantity], xscale="log")
            panel.set_xticks(ticks, map(str, ticks))
            panel.minorticks_off()
            panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        figure.axes[0].set_ylabel("times the dense model's time")
        if others:
            handles = [line_handle(line, **look) for line, look in looks.items()]
            figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": 2})


def _value(row: Row, name: str) -> Any:
    return row["options"].get(name, 0) if name in _SIZES and name != "batch_size" else row[name]


def _label(row: Row, names: Sequence[str]) -> str:
    """A line's name: what tells it from others."""
    values = ((name, _value(row, name)) for name in names)
    return ", ".join(f"{_WORDS[name]} {value}" if name in _WORDS else str(value) for name, value in values)
