"""Reliability diagrams: accuracy against confidence."""

from collections.abc import Mapping
from pathlib import Path

from ..metrics import CalibrationBins
from .canvas import picture
from .palette import category_color


def plot_reliability(groups: Mapping[str, CalibrationBins], path: Path) -> None:
    """Draws the accuracy of each bin of confidence, and below how many predictions are in it.

    Args:
        groups: Name -> its bins, all of one number; empty bins are left out.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with picture(path, 4.6, 4.8) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        upper.plot([0, 1], [0, 1], color="gray", linestyle=":", linewidth=1)
        for number, (name, bins) in enumerate(groups.items()):
            filled, color, width = bins.num_samples > 0, category_color(number), 1 / len(bins.num_samples)
            upper.plot(
                bins.confidence[filled].numpy(), bins.accuracy[filled].numpy(), marker="o", color=color, label=name
            )
            places = [(at + 0.5) * width for at in range(len(filled))]
            shares = bins.num_samples / bins.num_samples.sum().clamp(min=1)
            lower.bar(places, shares.tolist(), 0.9 * width, color=color, alpha=0.5)
        upper.set(ylabel="share of right predictions", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        upper.legend(loc="upper left")
        lower.set(xlabel="confidence", ylabel="share of images")
        lower.set_ylim(bottom=0)
