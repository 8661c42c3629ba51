"""Pictures of what a run found. The only place that needs matplotlib, and it is imported when a picture is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import MissingDependencyError
from ..results.tables import Table
from .domains import DomainMap
from .experts import ExpertMatrix, ExpertUsage

DPI = 150


def plot_domain_map(domains: DomainMap, path: Path, places: Mapping[str, Tensor] | None = None) -> None:
    """Draws discovered domains as a map, with coastlines where cartopy is installed.

    Args:
        domains: From `domain_map`.
        path: Picture to write.
        places: Name of a group -> (N, 2) coordinates, outlined and labelled on top.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = _figure(9.0, 4.8)
    axes = _world_axes(figure)
    used = [index for index in range(domains.num_experts) if (domains.experts == index).any()]
    edges = [_edges(values) for values in (domains.longitude, domains.latitude)]
    palette = _palette(domains.num_experts)
    axes.pcolormesh(*edges, domains.experts.numpy(), cmap=palette, vmin=-0.5, vmax=domains.num_experts - 0.5)
    for name, lonlat in (places or {}).items():
        axes.plot(*lonlat.T.numpy(), ".", color="black", markersize=1.0, alpha=0.35)
        middle = lonlat.double().mean(0).tolist()
        axes.text(*middle, name, ha="center", va="center", bbox={"facecolor": "white", "alpha": 0.8, "lw": 0}, size=8)
    axes.set(xlim=(-180, 180), ylim=(-90, 90), xlabel="longitude (degrees)", ylabel="latitude (degrees)")
    axes.set_title("Discovered domains: routed expert with the largest weight")
    handles = [_patch(palette(index), f"expert {index}") for index in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), frameon=False)
    figure.savefig(path, dpi=DPI)


def plot_expert_usage(usage: ExpertUsage, path: Path) -> None:
    """Draws, per mixture layer, how often each expert has the largest weight and how often it is selected.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    layers, num_experts = usage.frequency.shape
    figure = _figure(4.2 * layers, 3.4)
    for index, axes in enumerate(figure.subplots(1, layers, sharey=True, squeeze=False)[0]):
        positions = np.arange(num_experts)
        axes.bar(positions - 0.2, usage.frequency[index], 0.4, label="largest weight", color="tab:blue")
        axes.bar(positions + 0.2, usage.selected[index], 0.4, label="selected", color="tab:orange")
        axes.axhline(1 / num_experts, color="tab:blue", linestyle=":", linewidth=1)
        axes.set(xticks=positions, xlabel="expert", title=f"Mixture layer {index}", ylim=(0, 1.05))
    figure.axes[0].set_ylabel(f"share of {usage.num_routed} routed images")
    figure.axes[-1].legend(frameon=False)
    figure.savefig(path, dpi=DPI)


def plot_expert_matrix(matrix: ExpertMatrix, path: Path) -> None:
    """Draws the accuracy of each forced expert (column) on the samples of each discovered domain (row).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    columns = np.column_stack([matrix.routed.numpy(), matrix.accuracy.numpy()])
    figure = _figure(1.4 + 0.75 * columns.shape[1], 1.2 + 0.6 * len(columns))
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


def plot_confusion(matrix: Tensor, classes: Sequence[str], path: Path) -> None:
    """Draws a confusion matrix: colours are shares of each target, and counts are written in while they are legible.

    Args:
        matrix: (C, C) counts, rows are targets, see `metrics.confusion_matrix`.
        classes: Names of the classes.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    shares = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    side = min(3.5 + 0.35 * len(classes), 15.0)
    steps = range(0, len(classes), -(-len(classes) // 90))  # every name that there is room for
    names = [classes[index] for index in steps]
    figure = _figure(side + 1.0, side)
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    if len(classes) <= 30:
        for (row, column), count in np.ndenumerate(matrix.numpy()):
            colour = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
            axes.text(column, row, count, ha="center", va="center", color=colour, size=8)
    axes.set_xticks(steps, names, rotation=90 if max(map(len, names)) > 2 else 0, size=8)
    axes.set_yticks(steps, names, size=8)
    axes.set(xlabel="predicted class", ylabel="class of the image")
    figure.colorbar(image, label="share of the class's images", shrink=0.8)
    figure.savefig(path, dpi=DPI)


def plot_curves(steps: Sequence[int], curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draws each loss or score over the training steps, one panel each, four in a row.

    Args:
        steps: Steps of the evaluations.
        curves: Name -> one value per evaluation.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure = _figure(3.0 * columns, 2.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (name, values), axes in zip(curves.items(), panels, strict=False):
        axes.plot(steps, values, marker="o", markersize=3)
        axes.set(title=name, xlabel="step")
    for axes in figure.axes[len(curves) :]:
        axes.remove()
    figure.savefig(path, dpi=DPI)


def plot_cost(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the cost of mixture layers over dense models, against the number of experts and the batch size.

    Args:
        rows: Of `tools/benchmark.py`: "model", "against", "mode", "batch_size", "options", "ratio" (three quartiles).
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = _figure(9.0, 3.8)
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


def plot_accuracies(tables: Sequence[Table], path: Path) -> None:
    """Draws tables of results as bars, one panel a table, one group of bars a column, with standard errors.

    Args:
        tables: From `protocols.tables.make_tables`; at least one.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    rows = sorted({row for table in tables for row in table.rows})
    width = 0.8 / len(rows)
    figure = _figure(max(6.0, 1.2 + 1.1 * max(len(table.columns) for table in tables)), 0.6 + 3.0 * len(tables))
    for table, axes in zip(tables, figure.subplots(len(tables), squeeze=False)[:, 0], strict=True):
        for number, row in enumerate(row for row in rows if row in table.rows):
            cells = table.rows[row]
            places = np.arange(len(cells)) + (number - (len(table.rows) - 1) / 2) * width
            means = [100 * cell.mean for cell in cells]
            errors = [100 * cell.error for cell in cells]
            colour = f"C{rows.index(row)}"
            axes.bar(places, means, width, yerr=np.nan_to_num(errors), capsize=2, color=colour)
            for place, mean in zip(places, means, strict=True):
                if np.isnan(mean):
                    axes.text(place, 1.0, "missing", rotation=90, ha="center", va="bottom", size=7, color=colour)
        axes.set_xticks(range(len(table.columns)), table.columns)
        axes.set(ylabel="accuracy (%)", ylim=(0, 100), title=table.title)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [_patch(f"C{number}", str(row)) for number, row in enumerate(rows)]
    figure.legend(handles=handles, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=DPI)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError.of("drawing", "matplotlib", "plots") from error
    return Figure(figsize=(width, height), layout="constrained")


def _world_axes(figure: Any) -> Any:
    try:
        from cartopy.crs import PlateCarree
    except ImportError:
        return figure.subplots()
    axes = figure.add_subplot(projection=PlateCarree())
    axes.coastlines()
    return axes


def _palette(num_experts: int) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    source = colormaps["tab10" if num_experts <= 10 else "turbo"]
    return ListedColormap([source(index if num_experts <= 10 else index / num_experts) for index in range(num_experts)])


def _patch(colour: Any, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _edges(centres: Tensor) -> np.ndarray:
    half = (centres[1] - centres[0]) / 2 if len(centres) > 1 else centres.new_tensor(45.0)
    return np.append((centres - half).numpy(), float(centres[-1] + half))
