"""What pictures of images share: panels, names that fit, small files."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from .canvas import styled, text_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120  # a third less than of other pictures: photographs make files large
SIDE = 1.45  # inches, of an image in a grid
LONGEST = 60  # letters of a name that are shown
LETTER = 0.6  # width over size


@contextmanager
def image_grid(
    path: Path, rows: Sequence[str], columns: Sequence[str], extra: float = 0.0
) -> Iterator[tuple["Figure", np.ndarray]]:
    """Opens a figure of square panels without ticks, with names of rows at the left and of columns on top.

    Args:
        path: Picture that is written at the end, in few colors.
        rows: Their names.
        columns: Their names.
        extra: Lines of text below the panels, for a legend.

    Yields:
        The figure, and its axes as an array (rows, columns).

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    width = 0.6 + SIDE * len(columns)
    size = text_size(width)
    letters = max(6, int(72 * SIDE / (LETTER * size)))  # that fit beside or above a panel
    titles = [fitted(name, letters) for name in columns]
    lines = extra + max(title.count("\n") + 1 for title in titles)
    with styled(width, 0.2 + SIDE * len(rows) + lines * 1.4 * size / 72) as figure:
        panels = figure.subplots(len(rows), len(columns), squeeze=False)
        for axes in panels.flat:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, name in zip(panels[:, 0], rows, strict=True):
            axes.set_ylabel(fitted(name, letters))
        for axes, title in zip(panels[0], titles, strict=True):
            axes.set_title(title)
        yield figure, panels
        write_figure(figure, path)


def fitted(name: str, width: int) -> str:
    """A name in lines of so many letters; its middle is left out where it is too long."""
    if len(name) > LONGEST:
        name = f"{name[: LONGEST // 2 - 2]}...{name[-LONGEST // 2 + 2 :]}"
    return "\n".join(wrap(name, width)) or " "


def write_figure(figure: "Figure", path: Path) -> None:
    """Writes a picture in 256 colors, which makes it a third as large."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI)
    Image.open(file).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
