"""Confusion matrices."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from .canvas import picture
from .drawing import fitted

COUNTED = 30  # classes; the counts of more are too small to be read
NAMED = 90  # classes that there is room to name


def plot_confusion(matrix: Tensor, classes: Sequence[str], path: Path, title: str = "") -> None:
    """Draws a confusion matrix: colors are shares of each target, and counts are written in while they are legible.

    Args:
        matrix: (C, C) counts, rows are targets, see `metrics.confusion_matrix`.
        classes: Names of the classes.
        path: Picture to write.
        title: Model and domains, a line each; the number of images is added.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    shares = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    side = min(3.2 + 0.36 * len(classes), 14.0)
    steps = range(0, len(classes), -(-len(classes) // NAMED))
    names = [fitted(classes[index], 24) for index in steps]
    with picture(path, side + 1.0, side + 0.8, layout="compressed") as figure:
        axes = figure.subplots()
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
        for (row, column), count in np.ndenumerate(matrix.numpy()) if len(classes) <= COUNTED else ():
            color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
            axes.text(column, row, count, ha="center", va="center", color=color, size=min(9, 26 / len(str(count))))
        small = {"size": "small"} if len(classes) <= COUNTED else {"size": 7}
        axes.set_xticks(steps, names, rotation=90 if max(map(len, names)) > 2 else 0, **small)
        axes.set_yticks(steps, names, **small)
        axes.set(xlabel="predicted class", ylabel="class of the image")
        lines = [fitted(line, 44) for line in title.splitlines()]
        axes.set_title("\n".join([*lines, f"{int(matrix.sum())} images"]))
        figure.colorbar(image, label="share of the class's images", shrink=0.8)
