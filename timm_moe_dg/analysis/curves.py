"""The learning curves of a run: losses and accuracies over its evaluations, as numbers and as a picture."""

from collections.abc import Collection, Mapping, Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..protocols import Record, reported_accuracy, training_domain_validation, validation_accuracy
from .style import CATEGORIES, Style, category_color, fitted, optional_picture, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "learning_curves.png"
MEANS = {"training-domain validation": "-", "test domain (in)": "--"}  # what is selected by, and what is reported
OUT = " (out)"  # behind a domain's name: its accuracy on the out-split
MARKED = 5  # evaluations; points of more hide the dashes
LOG_FROM = 50  # times the smallest loss


def draw_learning_curves(records: Sequence[Record], domains: Sequence[str], folder: Path, file: str = FILE) -> None:
    """Draws the curves of a run, or says why they cannot be drawn.

    Args:
        records: Of one run; a final average has no place on the curves.
        domains: Names of the domains.
        folder: Where the picture goes.
        file: Its name.
    """
    with optional_picture(folder / file) as path:
        plot_learning_curves(records, domains, path)


def plot_learning_curves(records: Sequence[Record], domains: Sequence[str], path: Path) -> None:
    """Draws the curves of a run: all accuracies in one panel, on one scale, and the losses in a second.

    Lines of held-out domains are dashed, and a vertical line marks the step that training-domain validation selects.

    Args:
        records: Of one run; a final average has no place on the curves.
        domains: Names of the domains.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    trained = [record for record in records if not record.averaged]
    curves, steps = learning_curves(trained, domains), [record.step for record in trained]
    accuracies = {name: values for name, values in curves.items() if name not in trained[0].losses}
    tested = [f"{domains[at]}{OUT}" for at in trained[0].test_domains]
    above, below = accuracy_lines(accuracies, tested), loss_lines(trained)
    entries = sum(bool(line.label) for line in above) + 1
    with picture(path, 7.0, 5.6 + 0.3 * -(-entries // 2)) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        _draw(upper, steps, above)
        selected = training_domain_validation(trained).step
        upper.axvline(selected, color="black", linewidth=1, linestyle=":", label=f"selected step {selected}")
        upper.set(ylabel="accuracy (%)", ylim=(-3, 103))
        _draw(lower, steps, below)
        _scale(lower, below)
        lower.set(xlabel="step", ylabel="loss")
        lower.legend()
        figure.legend(*upper.get_legend_handles_labels(), loc="outside lower left", ncols=2)


def learning_curves(records: Sequence[Record], domains: Sequence[str]) -> dict[str, list[float]]:
    """Returns one value per record of each loss and score.

    These are the losses, the two accuracies that matter, each domain's on its out-split, and where the benchmark sets
    domains apart, accuracy and worst group of each role.

    Args:
        records: Of one run, at least one.
        domains: Names of the domains.
    """
    curves = {name: [record.losses[name] for record in records] for name in records[0].losses}
    curves["training-domain validation"] = [validation_accuracy(record) for record in records]
    curves["test domain (in)"] = [reported_accuracy(record) for record in records]
    curves |= {f"{name}{OUT}": [record.out_acc[at] for record in records] for at, name in enumerate(domains)}
    for role in records[0].roles:
        for score in ("accuracy", "worst_accuracy"):
            curves[f"{role} {score.replace('_', ' ')}"] = [record.roles[role][score] for record in records]
    return curves


class Line(NamedTuple):
    """One line of a panel.

    Attributes:
        label: In the legend; "" for none.
        values: One per evaluation.
        dashes: matplotlib's line style.
        color: None for the next of the palette.
        width: Points.
    """

    label: str
    values: Sequence[float]
    dashes: str = "-"
    color: str | None = None
    width: float = 1.6


def accuracy_lines(curves: Mapping[str, Sequence[float]], held_out: Collection[str]) -> list[Line]:
    """Says how accuracies are drawn: means in bold black, held-out domains dashed; without lines that have no value.

    Of more domains than there are colors, each is a thin gray line, and the legend names them together.

    Args:
        curves: From `learning_curves`, without losses.
        held_out: Names of those among them that are of held-out domains.
    """
    kept = {name: [100 * value for value in values] for name, values in curves.items() if not all(map(isnan, values))}
    means = [Line(name, kept[name], dashes, "black", 2.6) for name, dashes in MEANS.items() if name in kept]
    domains = [Line(name, kept[name], "--" if name in held_out else "-") for name in kept if name.endswith(OUT)]
    roles = [Line(name, kept[name], ":", width=2.2) for name in kept if name not in MEANS and not name.endswith(OUT)]
    if len(domains) + len(roles) > CATEGORIES:
        domains = _together(domains)
    free = map(category_color, range(CATEGORIES))
    return [*means, *(line if line.color else line._replace(color=next(free)) for line in (*roles, *domains))]


def _together(domains: Sequence[Line]) -> list[Line]:
    """Thin gray lines, of which the first of a kind stands for all in the legend."""
    labels = {"-": f"each training domain{OUT}", "--": f"each held-out domain{OUT}"}
    return [line._replace(label=labels.pop(line.dashes, ""), color="#777777", width=0.6) for line in domains]


def loss_lines(records: Sequence[Record]) -> list[Line]:
    """Each loss in a color of its own."""
    names = enumerate(records[0].losses)
    return [Line(name, [one.losses[name] for one in records], color=category_color(at)) for at, name in names]


def _draw(axes: "Axes", steps: Sequence[int], lines: Sequence[Line]) -> None:
    marker = "o" if len(steps) <= MARKED else None
    for label, values, dashes, color, width in lines:
        style: Style = {"linestyle": dashes, "color": color, "linewidth": width, "marker": marker}
        axes.plot(steps, values, label=fitted(label, 30) if label else None, **style)


def _scale(axes: "Axes", lines: Sequence[Line]) -> None:
    """A logarithmic scale where losses differ so much that the small ones could not be seen."""
    values = [value for line in lines for value in line.values if isfinite(value)]
    if values and min(values) > 0 and max(values) > LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
