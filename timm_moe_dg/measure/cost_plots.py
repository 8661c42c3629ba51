"""Picture of a mixture's time over that of the dense models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..analysis.style import LEGEND_BELOW, category_color, fitted, line_handle, picture

Row = Mapping[str, Any]
MARKERS = "os^Dvpx*"
SIZES = {"num_experts": "experts", "top_k": "experts per item", "img_size": "pixels", "batch_size": "batch"}
CONDITIONS = ("model", "mode", "dtype", "program", "dispatch")


def plot_cost(rows: Sequence[Row], path: Path) -> None:
    """Draws a panel for each dense model: time ratios against the first size that was varied, a line per other setting.

    Rows are those of `tools/benchmark.py models`: "model", "against", "options", the conditions and "ratio".
    """
    rows = [row for row in rows if row["against"] != row["model"]]
    varied = [name for name in (*SIZES, *CONDITIONS) if len({_value(row, name) for row in rows}) > 1]
    size = next((name for name in varied if name in SIZES), "batch_size")
    others = [name for name in varied if name != size]
    panels = list(dict.fromkeys(row["against"] for row in rows))
    labels = list(dict.fromkeys(_label(row, others) for row in rows))
    styles = {
        label: {"color": category_color(number), "marker": MARKERS[number % len(MARKERS)]}
        for number, label in enumerate(labels)
    }
    with picture(path, max(3.6 * len(panels), 5.0), 3.6 + 0.25 * -(-len(labels) // 2)) as figure:
        for panel, against in zip(np.ravel(figure.subplots(1, len(panels), sharey=True)), panels, strict=True):
            panel.set_title(fitted(f"over the {against}" if " " in against or "-" in against else against, 30))
            for label, style in styles.items():
                line = [row for row in rows if row["against"] == against and _label(row, others) == label]
                points = sorted((_value(row, size), *row["ratio"]) for row in line)
                x, low, middle, high = np.array(points, dtype=float).T
                panel.errorbar(x, middle, [middle - low, high - middle], **style)
            ticks = sorted({_value(row, size) for row in rows})
            panel.set(xlabel=SIZES[size], xscale="log")
            panel.set_xticks(ticks, map(str, ticks))
            panel.minorticks_off()
            panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        figure.axes[0].set_ylabel("times the dense model's time")
        if others:
            handles = [line_handle(label, **style) for label, style in styles.items()]
            figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": 2})


def _value(row: Row, name: str) -> Any:
    return row["options"].get(name, 0) if name in SIZES and name != "batch_size" else row[name]


def _label(row: Row, names: Sequence[str]) -> str:
    values = ((name, _value(row, name)) for name in names)
    return ", ".join(f"{SIZES[name]} {value}" if name in SIZES else str(value) for name, value in values)
