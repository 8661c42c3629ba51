"""Learning curves of a run: losses and accuracies over its evaluations, as numbers and as a picture."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import RecordError
from ..protocols.records import Record
from ..protocols.selection import headline_accuracy, reported_accuracy, training_domain_validation, validation_accuracy
from .style import CATEGORIES, Style, category_color, fitted, optional_picture, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "learning_curves.png"
MEANS = {"training-domain validation": "-", "test domain (in)": "--"}  # selection, and the papers' tables
OUT = " (out)"  # suffix of a domain's name: accuracy on its out-split
MAX_MARKED = 5  # evaluations; markers of more hide the dashes
LOG_RATIO = 50  # of the largest to the smallest loss, for a logarithmic axis


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
