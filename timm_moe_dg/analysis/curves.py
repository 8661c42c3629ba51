"""The learning curves of a run: losses and accuracies over its evaluations, as numbers and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..protocols import Record, reported_accuracy, validation_accuracy
from .canvas import DPI, new_figure, optional_picture
from .drawing import fitted

FILE = "learning_curves.png"


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
    """Draws the curves of a run.

    Args:
        records: Of one run; a final average has no place on the curves.
        domains: Names of the domains.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    trained = [record for record in records if not record.averaged]
    plot_curves([record.step for record in trained], learning_curves(trained, domains), path)


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
    curves |= {f"{name} (out)": [record.out_acc[at] for record in records] for at, name in enumerate(domains)}
    for role in records[0].roles:
        for score in ("accuracy", "worst_accuracy"):
            curves[f"{role} {score.replace('_', ' ')}"] = [record.roles[role][score] for record in records]
    return curves


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
    figure = new_figure(3.0 * columns, 2.4 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (name, values), axes in zip(curves.items(), panels, strict=False):
        axes.plot(steps, values, marker="o", markersize=3)
        axes.set(title=fitted(name, 32), xlabel="step")
    for axes in figure.axes[len(curves) :]:
        axes.remove()
    figure.savefig(path, dpi=DPI)
