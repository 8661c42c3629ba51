"""Reliability diagrams: accuracy against confidence."""

from collections.abc import Mapping
from pathlib import Path

from ..metrics import CalibrationBins
from .canvas import DPI, new_figure


def plot_reliability(groups: Mapping[str, CalibrationBins], path: Path) -> None:
    """Draws the accuracy of each bin of confidence, and below how many predictions are in it.

    Args:
        groups: Name -> its bins, all of one number; empty bins are left out.
        path: Picture to write.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure(4.6, 4.8)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper.plot([0, 1], [0, 1], color="gray", linestyle=":", linewidth=1)
    for number, (name, bins) in enumerate(groups.items()):
        filled = bins.num_samples > 0
        upper.plot(bins.confidence[filled].numpy(), bins.accuracy[filled].numpy(), marker="o", markersize=4, label=name)
        width = 1 / len(filled)
        places = [(at + 0.5) * width for at in range(len(filled))]
        shares = bins.num_samples / bins.num_samples.sum().clamp(min=1)
        lower.bar(places, shares.tolist(), 0.9 * width, color=f"C{number}", alpha=0.5)
    upper.set(ylabel="share of right predictions", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    upper.legend(frameon=False, fontsize=8, loc="upper left")
    lower.set(xlabel="confidence", ylabel="share of images")
    figure.savefig(path, dpi=DPI)
