"""Pictures of a network's scores: confusion matrices and reliability diagrams."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from ..metrics import CalibrationBins
from .style import category_color, fitted, picture, text_size

MAX_COUNTED = 30  # classes; counts of more are too small to read
MAX_NAMED = 90  # classes; of more, only every second or third is named


def plot_confusion(matrix: Tensor, classes: Sequence[str], path: Path, title: str = "") -> None:
    """Draws (C, C) counts, a row for each target, colored by share. Up to 30 classes, the cells hold counts."""
    shares = (matrix / matrix.sum(1, keepdim=True).clamp(min=1)).numpy()
    side = min(3.2 + 0.36 * len(classes), 14.0)
    cell = 72 * (side - 1.5) / max(len(classes), 4)  # approximate width, points
    steps = range(0, len(classes), -(-len(classes) // MAX_NAMED))
    names = [fitted(classes[index], 24) for index in steps]
    with picture(path, side + 1.0, side + 0.8, layout="compressed") as figure:
        axes = figure.subplots()
        # scikit-learn's display colors by count, which hides the rare classes
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
        largest = min(text_size(side), cell * 1.4 / len(str(int(matrix.max()))))
        for (row, column), count in np.ndenumerate(matrix.numpy()) if len(classes) <= MAX_COUNTED else ():
            color = "white" if shares[row, column] > 0.5 else "black" if count else "silver"
            axes.text(column, row, count, ha="center", va="center", color=color, size=largest)
        lines = max(name.count("\n") + 1 for name in names)
        size = min(text_size(side), 0.8 * cell * steps.step / lines)
        axes.set_xticks(steps, names, rotation=90 if max(map(len, names)) > 2 else 0, size=size)
        axes.set_yticks(steps, names, size=size)
        axes.set(xlabel="predicted class", ylabel="class of the image")
        above = [fitted(line, 44) for line in title.splitlines()]
        axes.set_title("\n".join([*above, f"{int(matrix.sum())} images"]))
        figure.colorbar(image, label="share of the class's images", shrink=0.8)


def plot_reliability(groups: Mapping[str, CalibrationBins], path: Path) -> None:
    """Draws the accuracy of each filled confidence bin, and below it the share of predictions in the bin."""
    with picture(path, 4.6, 4.8) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.plot([0, 1], [0, 1], color="gray", linestyle=":", linewidth=1)
        for number, (name, bins) in enumerate(groups.items()):
            filled, color, width = bins.num_samples > 0, category_color(number), 1 / len(bins.num_samples)
            confidence, accuracy = bins.confidence[filled].numpy(), bins.accuracy[filled].numpy()
            upper.plot(confidence, accuracy, marker="o", color=color, label=name)
            centers = [(index + 0.5) * width for index in range(len(filled))]
            shares = bins.num_samples / bins.num_samples.sum().clamp(min=1)
            lower.bar(centers, shares.tolist(), 0.9 * width, color=color, alpha=0.5)
        upper.set(ylabel="share of right predictions", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        upper.legend(loc="upper left")
        lower.set(xlabel="confidence", ylabel="share of images")
        lower.set_ylim(bottom=0)
