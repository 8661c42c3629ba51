"""Pictures of runs and of tables: learning curves, bars of accuracies, examples of data, statistics of routing."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import Domain
from ..errors import RecordError
from ..metrics import METRICS
from ..protocols.records import Record
from ..protocols.selection import headline_score, held_out_score, training_domain_validation, validation_score
from ..results.runs import domain_names, unseen_of_most_frequent
from .style import (
    CATEGORIES,
    GRID_DPI,
    LEGEND_BELOW,
    Style,
    category_color,
    fitted,
    image_grid,
    line_handle,
    picture,
    swatch,
    text_size,
    write_numbers,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    # Imports pandas, which training does without
    from ..results.answer import Answer
    from ..results.runs import RowKey
    from ..results.tables import Table
    from .routing_statistics import Association, PermutationTest

MEANS = {"training-domain validation": "-", "test domain (in)": "--"}  # selection, and the papers' tables
OUT = " (out)"  # suffix of a domain's name: accuracy on its out-split
MAX_MARKED = 5  # evaluations; markers of more hide the dashes
MAX_WIDTH = 10.0  # inches, of bars
MAX_LIFT = 8.0  # end of the color scale
MAX_ROWS, MAX_COLUMNS = 40, 16  # of tables with numbers
COLUMN_WIDTH, NUMBER_SIZE = 0.36, 8.0  # inches, and points of a number that fits into them


def plot_learning_curves(records: Sequence[Record], domains: Sequence[str], path: Path) -> None:
    """Draws a run's accuracies, dashed for held-out domains, with the selected step, and its losses below them.

    A run that ends with an average of its weights has no selected step. More domains than colors are left out.
    """
    trained = [record for record in records if not record.averaged]  # averaged weights have no step of their own
    if not trained:
        raise RecordError("an average of runs has no learning curves")
    curves = learning_curves(trained, domains if len(domains) <= CATEGORIES else ())
    held_out = [f"{domains[index]}{OUT}" for index in trained[0].test_domains]
    with picture(path, 7.0, 5.6 + 0.3 * -(-len(curves) // 2)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for name, values in curves.items():
            style: Style = {"linestyle": "--" if name in held_out else "-" if name.endswith(OUT) else ":"}
            if name in MEANS:
                style = {"linestyle": MEANS[name], "color": "black", "linewidth": 2.6}
            _draw(upper, trained, fitted(name, 30), [100 * value for value in values], **style)
        selected = training_domain_validation(records)
        if not selected.averaged:
            label = f"selected step {selected.step}"
            upper.axvline(selected.step, color="black", linewidth=1, linestyle=":", label=label)
        upper.set(ylabel=f"{METRICS[records[0].metric]} (%)", ylim=(-3, 103))
        # The same order and colors, whether the records come from the run or from its file
        for name in sorted(trained[0].losses, key=lambda name: (name != "loss", name)):
            _draw(lower, trained, name, [record.losses[name] for record in trained])
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
            values = [100 * headline_score(record) for record in trained]
            _draw(axes, trained, fitted(name, 30), values, linestyle=("-", "--", ":")[index // CATEGORIES % 3])
        metrics = {METRICS[records[0].metric] for records in runs.values() if records}
        axes.set(xlabel="step", ylabel=f"held-out {' or '.join(sorted(metrics))} (%)")
        figure.legend(loc="outside lower left", ncols=2)


def learning_curves(records: Sequence[Record], domains: Sequence[str]) -> dict[str, list[float]]:
    """Returns curves by name, one value per record: accuracies of all domains, scores of the data's roles.

    Curves without any value are left out.
    """
    curves = {"training-domain validation": [validation_score(record) for record in records]}
    if not records[0].roles:  # their curves follow; a mean over them would have no meaning
        part = "" if records[0].reported_split == "whole" else " (in)"
        curves[f"test domain{part}"] = [held_out_score(record) for record in records]
    scores = [record.scores_on("out") for record in records]
    curves |= {f"{name}{OUT}": [values[index] for values in scores] for index, name in enumerate(domains)}
    for role in records[0].roles:
        for score in dict.fromkeys((records[0].metric, "worst_accuracy")):
            curves[f"{role} {score.replace('_', ' ')}"] = [record.roles[role][score] for record in records]
    return {name: values for name, values in curves.items() if not all(map(isnan, values))}


def _draw(axes: "Axes", records: Sequence[Record], label: str, values: Sequence[float], **style: Any) -> None:
    marker = "o" if len(records) <= MAX_MARKED else None
    axes.plot([record.step for record in records], values, label=label, marker=marker, **style)


def plot_examples(domains: Sequence[Domain], path: Path, columns: int) -> None:
    """Draws the first image of each of the first `columns` classes, a row for each domain."""
    classes = domains[0].classes[:columns]
    with image_grid(path, [domain.name for domain in domains], classes) as (_, panels):
        for domain, row in zip(domains, panels, strict=True):
            for target, axes in enumerate(row):
                positions = np.flatnonzero(np.asarray(domain.targets) == target)
                if len(positions):  # a domain may lack a class
                    axes.imshow(domain.image(int(positions[0])))


def plot_accuracies(tables: Sequence["Table"], path: Path) -> None:
    """Draws tables as bars with standard errors: a panel for each table, a group of bars for each column.

    Dotted lines mark `zeros`. The legend counts the seeds of each row.
    """
    rows = sorted({row for table in tables for row in table.rows})
    colors = {row: category_color(index) for index, row in enumerate(rows)}
    width = min(max(6.0, 1.2 + 1.1 * max(len(table.columns) for table in tables)), MAX_WIDTH)
    line = text_size(width) / 50  # height of a line of text, inches
    handles: list[Any] = [swatch(colors[row], fitted(f"{row} ({_seeds(tables, row)})", 60)) for row in rows]
    of_tables = [zeros(table) for table in tables]
    names = {name for name, _ in of_tables if name}
    handles += [line_handle(name, color="black", linestyle=":") for name in sorted(names)]
    # Names beside each other have room for 60 letters
    upright = max(sum(map(len, table.columns)) for table in tables) > 60
    with picture(path, width, (6.0 if upright else 4.0) * len(tables) + 0.4 + line * len(handles)) as figure:
        panels = figure.subplots(len(tables), squeeze=False)[:, 0]
        for table, (_, values), axes in zip(tables, of_tables, panels, strict=True):
            _bars(axes, table, colors)
            positions = np.arange(len(table.columns))
            axes.hlines(values, positions - 0.45, positions + 0.45, color="black", linestyle=":", linewidth=1.2)
            axes.tick_params(axis="x", rotation=90 if upright else 0)
        figure.legend(handles=handles, loc="outside lower center")


def plot_answer(answer: "Answer", scores: "pd.DataFrame", path: Path) -> None:
    """Draws the differences to the reference: a point for each pair of runs, a diamond for the mean with its interval.

    Pairs of one domain stand on one line. The band marks differences that are equal in practice.

    Raises:
        RecordError: There is no pair of rows.
    """
    from ..results.answer import paired

    pairs = list(answer.pairs.itertuples())
    if not pairs:
        raise RecordError(f"rows={list(answer.rows.index)}: no pair to draw; add a row that is trained")
    heights = dict(zip(answer.domains, np.linspace(-0.3, 0.1, len(answer.domains.columns)), strict=True))
    with picture(path, 6.0, 1.1 + 0.75 * len(pairs)) as figure:
        axes = figure.subplots()
        axes.axvspan(-100 * answer.equal_within, 100 * answer.equal_within, color="#E8E8E8")
        axes.axvline(0, color="black", linewidth=1)
        for number, pair in enumerate(pairs):
            differences = 100 * paired(scores, pair.first, pair.second)
            places = [number + heights[domain] for domain in differences.index.get_level_values("domain")]
            axes.plot(differences, places, "o", color="#888888", alpha=0.6, markeredgewidth=0)
            half = np.nan_to_num(50 * (pair.high - pair.low))  # one domain has no interval
            style: Style = {"marker": "D", "markersize": 6, "linewidth": 2, "color": category_color(0)}
            axes.errorbar(100 * pair.difference, number + 0.28, xerr=half, **style)
            name = f"{fitted(pair.first, 70)}: {pair.verdict}"
            axes.text(0.01, number - 0.5, name, transform=axes.get_yaxis_transform(), verticalalignment="center")
        axes.set(xlabel=f"difference to {fitted(pairs[0].second, 70)} (points)")
        axes.set(ylim=(len(pairs) - 0.4, -0.75), yticks=[])


def zeros(table: "Table") -> tuple[str, list[float]]:
    """Names what a network has to beat, and returns its scores in percent by column, NaN where it has none.

    It is the most frequent class of the training images where runs record it, or else guessing.
    """
    runs = [run for runs in table.runs.values() for run in runs]
    by_title = defaultdict(list)
    for record in (run.records[0] for run in runs):
        names = domain_names([record])
        if table.trained_on and [names[domain] for domain in record.training_domains] != [table.trained_on]:
            continue  # a run of another table
        split = "out" if table.trained_on and record.reported_split == "in" else record.reported_split
        for name, score in unseen_of_most_frequent(record, split).items():
            by_title[f"ood {name}" if record.roles else name].append(score)
    means = {title: fmean(scores) for title, scores in by_title.items() if title in table.columns}
    if means:
        averages = {title: fmean(means.values()) for title in table.columns if title.startswith("average")}
        zero = "most frequent class of the training images"
        return zero, [100 * {**averages, **means}.get(title, nan) for title in table.columns]
    classes = {run.args.get("num_classes") for run in runs}
    number = classes.pop() if len(classes) == 1 else None  # DomainBed's records have none
    return "guessing" if number else "", [100 / number if number else nan] * len(table.columns)


def _seeds(tables: Sequence["Table"], row: "RowKey") -> str:
    numbers = {n for table in tables if row in table.rows for n in table.summary().loc[row].seeds if n} or {0}
    return f"seeds: {min(numbers)}" + (f" to {max(numbers)}" if len(numbers) > 1 else "")


def _bars(axes: "Axes", table: "Table", colors: Mapping["RowKey", str]) -> None:
    width, summary = 0.8 / max(len(table.rows), 1), table.summary()
    positions = np.arange(len(table.columns))
    for number, row in enumerate(sorted(table.rows)):
        cells, shift = 100 * summary.loc[row], (number - (len(table.rows) - 1) / 2) * width
        axes.bar(positions + shift, cells["mean"], width, yerr=cells.error.fillna(0.0), color=colors[row])
    axes.set_xticks(positions, [fitted(title, 24) for title in table.columns])
    metrics = {METRICS[runs[0].metric] for runs in table.runs.values()} or {"accuracy"}
    axes.set(ylabel=f"{metrics.pop()} (%)", ylim=(0, 100), title=fitted(table.title, 60))


def plot_associations(groups: Mapping[str, "Association"], path: Path) -> None:
    """Draws the rows of all groups twice: shares of each row, and lift over independence. Empty rows are hatched."""
    rows = [": ".join(filter(None, (group, row))) for group, table in groups.items() for row in table.rows]
    shares = np.concatenate([table.shares for table in groups.values()])
    names, bound = [fitted(name, 30) for name in rows], np.log2(MAX_LIFT)
    with np.errstate(divide="ignore"):  # log2(0) is -inf, which is clipped
        log_lift = np.log2(np.concatenate([table.lift for table in groups.values()])).clip(-bound, bound)
    width = 3.0 + 2 * max(1.4, COLUMN_WIDTH * shares.shape[1])
    height = max(0.28, text_size(width) / 52) * sum(name.count("\n") + 1 for name in names)
    with picture(path, width, 1.6 + height, dpi=GRID_DPI) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_table(left, shares, "share of the row", cmap="cividis", vmin=0, vmax=1)
        _draw_table(right, log_lift, "log2 of the lift", cmap="PuOr_r", vmin=-bound, vmax=bound)
        left.set_yticks(range(len(rows)), names)


def _draw_table(axes: "Axes", values: np.ndarray, label: str, **scale: Any) -> None:
    axes.set_facecolor("white")  # the background of masked cells, which are hatched
    axes.patch.set(hatch="///", edgecolor="silver")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **scale)
    if len(values) <= MAX_ROWS and values.shape[1] <= MAX_COLUMNS:
        write_numbers(axes, image, values, size=NUMBER_SIZE)
    steps = range(0, values.shape[1], -(-values.shape[1] // MAX_COLUMNS))
    axes.set_xticks(steps, map(str, steps))
    axes.set_xlabel("expert")
    bar = axes.figure.colorbar(image, ax=axes, orientation="horizontal", aspect=20, fraction=0.05)
    bar.set_label(label)


def plot_nulls(tests: Mapping[str, "PermutationTest"], label: str, path: Path) -> None:
    """Draws statistics as points on the ranges of their null distributions."""
    names = [fitted(name, 34) for name in tests]
    point: Style = {"marker": "o", "linestyle": "", "color": category_color(1), "markersize": 6}
    with picture(path, 6.0, 1.9 + 0.26 * sum(name.count("\n") + 1 for name in names), dpi=GRID_DPI) as figure:
        axes = figure.subplots()
        for row, test in enumerate(tests.values()):
            low, high = float(test.null.min()), float(test.null.max())
            axes.plot([low, high], [row, row], color="#808080", linewidth=5, solid_capstyle="butt")
            axes.plot(test.value, row, **point)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(label, loc="right")
        handles = [line_handle("this router", **point), line_handle("permuted patches (range)", linewidth=5)]
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": 2})
