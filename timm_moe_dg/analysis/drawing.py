"""What pictures of images share: panels, names that fit, small files."""

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from PIL import Image

from .canvas import new_figure

DPI = 120  # a third less than of other pictures: photographs make files large
SIDE = 1.45  # inches, of an image in a grid
LONGEST = 60  # letters of a name that are shown


def image_grid(rows: Sequence[str], columns: Sequence[str], extra: float = 0.0) -> tuple[Any, np.ndarray]:
    """A figure of square panels without ticks, with names of rows at the left and of columns on top.

    Args:
        rows: Their names.
        columns: Their names.
        extra: Inches below the panels, for a legend.

    Returns:
        The figure, and its axes as an array (rows, columns).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure(0.5 + SIDE * len(columns), 0.3 + SIDE * len(rows) + extra)
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, name in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(fitted(name, 24), size=8)
    for axes, name in zip(panels[0], columns, strict=True):
        axes.set_title(fitted(name, 20), size=8)
    return figure, panels


def fitted(name: str, width: int) -> str:
    """A name in lines of so many letters; its middle is left out where it is too long."""
    if len(name) > LONGEST:
        name = f"{name[: LONGEST // 2 - 2]}...{name[-LONGEST // 2 + 2 :]}"
    return "\n".join(wrap(name, width)) or " "


def write_figure(figure: Any, path: Path) -> None:
    """Writes a picture in 256 colors, which makes it a third as large."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    Image.open(file).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
