"""Pictures of runs and of tables: learning curves, bars of accuracies, lines of ablations, examples of a data set."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..data import Domain
from ..errors import ArgumentError, RecordError
from ..protocols.records import Record
from ..protocols.run_identity import in_effect
from ..protocols.selection import headline_accuracy, reported_accuracy, training_domain_validation, validation_accuracy
from .style import (
    CATEGORIES,
    LETTER_WIDTH,
    Style,
    category_color,
    fitted,
    image_grid,
    model_colors,
    optional_picture,
    picture,
    swatch,
    text_size,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    # Imports pandas, which training does without
    from ..results.runs import RowKey
    from ..results.tables import Table

FILE = "learning_curves.png"
MEANS = {"training-domain validation": "-", "test domain (in)": "--"}  # selection, and the papers' tables
OUT = " (out)"  # suffix of a domain's name: accuracy on its out-split
MAX_MARKED = 5  # evaluations; markers of more hide the dashes
LOG_RATIO = 50  # of the largest to the smallest loss, for a logarithmic axis
MAX_WIDTH = 10.0  # inches, of bars


def draw_learning_curves(records: Sequence[Record], domains: Sequence[str], folder: Path, file: str = FILE) -> None:
    """Draws the curves of a run as `plot_learning_curves` does, and logs a warning if they cannot be drawn."""
    with optional_picture(folder / file) as path:
        plot_learning_curves(records, domains, path)


def plot_learning_curves(records: Sequence[Record], domains: Sequence[str], path: Path) -> None:
    """Draws a run's accuracies, dashed for held-out domains, with the selected step, and its losses beside them.

    A run that ends with an average of its weights has no selected step.
    """
    trained = [record for record in records if not record.averaged]  # averaged weights have no step of their own
    if not trained:
        raise RecordError("an average of runs has no learning curves")
    steps = [record.step for record in trained]
    held_out = [f"{domains[index]}{OUT}" for index in trained[0].test_domains]
    above, below = accuracy_lines(learning_curves(trained, domains), held_out), loss_lines(trained)
    entries = sum(bool(line.label) for line in above) + 1
    with picture(path, 7.0, 5.6 + 0.3 * -(-entries // 2)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        _draw(upper, steps, above)
        selected = training_domain_validation(records)
        if not selected.averaged:
            label = f"selected step {selected.step}"
            upper.axvline(selected.step, color="black", linewidth=1, linestyle=":", label=label)
        upper.set(ylabel="accuracy (%)", ylim=(-3, 103))
        _draw(lower, steps, below)
        losses = [value for line in below for value in line.values if isfinite(value)]
        if losses and min(losses) > 0 and max(losses) > LOG_RATIO * min(losses):  # small ones could not be seen
            lower.set_yscale("log")
            lower.yaxis.set_major_formatter("{x:g}")
        lower.set(xlabel="step", ylabel="loss")
        lower.legend(loc="upper right")  # "best" takes seconds on a busy machine, and warns
        figure.legend(*upper.get_legend_handles_labels(), loc="outside lower left", ncols=2)


def plot_runs(runs: Mapping[str, Sequence[Record]], path: Path) -> None:
    """Draws the accuracy on held-out data over the steps, one line for each run by name (SF-MoE, Figure 4, left).

    The accuracy is that of summary.csv: of the test domains, or of the "ood" or "id" images where the data has roles.
    """
    with picture(path, 7.0, 4.6 + 0.3 * -(-len(runs) // 2)) as figure:
        axes = figure.subplots()
        for index, (name, records) in enumerate(runs.items()):
            trained = [record for record in records if not record.averaged]
            values = [100 * headline_accuracy(record) for record in trained]
            dashes = ("-", "--", ":")[index // CATEGORIES % 3]
            _draw(axes, [record.step for record in trained], [Line(name, values, dashes, category_color(index))])
        axes.set(xlabel="step", ylabel="held-out accuracy (%)")
        figure.legend(loc="outside lower left", ncols=2)


def learning_curves(records: Sequence[Record], domains: Sequence[str]) -> dict[str, list[float]]:
    """Returns curves by name, one value per record: accuracies of all domains, scores of the data's roles."""
    curves = {"training-domain validation": [validation_accuracy(record) for record in records]}
    if not records[0].roles:  # their curves follow; a mean over them would have no meaning
        curves["test domain (in)"] = [reported_accuracy(record) for record in records]
    curves |= {f"{name}{OUT}": [record.out_acc[index] for record in records] for index, name in enumerate(domains)}
    for role in records[0].roles:
        for score in ("accuracy", "worst_accuracy"):
            curves[f"{role} {score.replace('_', ' ')}"] = [record.roles[role][score] for record in records]
    return curves


class Line(NamedTuple):
    """One line of a panel."""

    label: str  # in the legend; "" for none
    values: Sequence[float]  # one per evaluation
    dashes: str = "-"  # matplotlib's line style
    color: str | None = None  # None for the next color of the palette
    width: float = 1.6  # points


def accuracy_lines(curves: Mapping[str, Sequence[float]], held_out: Collection[str]) -> list[Line]:
    """Styles the lines of accuracies: means in bold black, held-out domains dashed, without empty curves."""
    percent = {
        name: [100 * value for value in values] for name, values in curves.items() if not all(map(isnan, values))
    }
    means = [Line(name, percent[name], dashes, "black", 2.6) for name, dashes in MEANS.items() if name in percent]
    domains = [Line(name, percent[name], "--" if name in held_out else "-") for name in percent if name.endswith(OUT)]
    others = [name for name in percent if name not in MEANS and not name.endswith(OUT)]
    roles = [Line(name, percent[name], ":", width=2.2) for name in others]
    if len(domains) + len(roles) > CATEGORIES:  # thin and gray; the first of each kind labels all of them
        labels = {"-": f"each training domain{OUT}", "--": f"each held-out domain{OUT}"}
        grays = [(labels.pop(line.dashes, ""), line) for line in domains]
        domains = [line._replace(label=label, color="#777777", width=0.6) for label, line in grays]
    colors = map(category_color, range(CATEGORIES))
    return [*means, *(line if line.color else line._replace(color=next(colors)) for line in (*roles, *domains))]


def loss_lines(records: Sequence[Record]) -> list[Line]:
    """Styles the lines of losses, in one order whether the records come from the run or from its file."""
    names = sorted(records[0].losses, key=lambda name: (name != "loss", name))
    return [
        Line(name, [record.losses[name] for record in records], color=category_color(index))
        for index, name in enumerate(names)
    ]


def _draw(axes: "Axes", steps: Sequence[int], lines: Sequence[Line]) -> None:
    marker = "o" if len(steps) <= MAX_MARKED else None
    for label, values, dashes, color, width in lines:
        style: Style = {"linestyle": dashes, "color": color, "linewidth": width, "marker": marker}
        axes.plot(steps, values, label=fitted(label, 30) if label else None, **style)


def plot_examples(domains: Sequence[Domain], path: Path, columns: int) -> None:
    """Draws the first image of each of the first `columns` classes, a row for each domain."""
    classes = domains[0].classes[:columns]
    with image_grid(path, [domain.name for domain in domains], classes) as (_, panels):
        for domain, row in zip(domains, panels, strict=True):
            for target, axes in enumerate(row):
                positions = np.flatnonzero(np.asarray(domain.targets) == target)
                if len(positions):  # a domain may lack a class
                    axes.imshow(domain.image(int(positions[0])))


def bars_of(cells: "pd.DataFrame") -> tuple[list[float], list[float]]:
    """Returns means and standard errors in percent of cells of `Table.summary`.

    A missing mean is NaN, a missing error is 0.
    """
    return list(100 * cells["mean"]), list(100 * cells["error"].fillna(0.0))


def ablation_lines(table: "Table", setting: str, column: str) -> dict[str, list[tuple[Any, "pd.Series"]]]:
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
            name = str(replace(row, variant=others))
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


def plot_ablation(table: "Table", setting: str, column: str, path: Path) -> None:
    """Draws a column of a table against an option or model argument, with standard errors, as in MoGE's Figure 2."""
    lines = ablation_lines(table, setting, column)
    values = sorted({value for points in lines.values() for value, _ in points}, key=_order)
    with picture(path, 6.0, 3.8 + 0.2 * len(lines)) as figure:
        axes = figure.subplots()
        for number, (name, points) in enumerate(lines.items()):
            positions, means = [values.index(value) for value, _ in points], [100 * cell["mean"] for _, cell in points]
            errors = [np.nan_to_num(100 * cell["error"]) for _, cell in points]
            style: Style = {"marker": "o", "color": category_color(number), "label": fitted(name, 60)}
            axes.errorbar(positions, means, errors, **style)
        axes.set_xticks(range(len(values)), map(str, values))
        axes.set(xlabel=setting, ylabel=f"{column} (%)", title=fitted(table.title, 60))
        figure.legend(loc="outside lower center")


def plot_accuracies(tables: Sequence["Table"], path: Path) -> None:
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


def _column_titles(table: "Table", width: float) -> tuple[list[str], bool]:
    """The labels below the bars, and whether lack of room turns them upright."""
    letters = int(72 * (width - 1.5) / len(table.columns) / (LETTER_WIDTH * text_size(width)))
    upright = max(map(len, table.columns)) > letters
    return [fitted(title, 24) if upright else title for title in table.columns], upright


def chance(table: "Table") -> float:
    """The accuracy of guessing in percent; NaN if the runs differ in their number of classes, or do not record it."""
    classes = {run.args.get("num_classes") for runs in table.runs.values() for run in runs}
    number = classes.pop() if len(classes) == 1 else None  # DomainBed's records have none
    return 100 / number if number else float("nan")


def _seeds(tables: Sequence["Table"], row: "RowKey") -> str:
    numbers = {n for table in tables if row in table.rows for n in table.summary().loc[row].seeds if n} or {0}
    low, high = min(numbers), max(numbers)
    return f"{low} seed{'s' * (low != 1)}" if low == high else f"{low} to {high} seeds"


def _bars(axes: "Axes", table: "Table", colors: Mapping["RowKey", str]) -> None:
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
