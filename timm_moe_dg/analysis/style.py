"""The style of every picture: colors, fonts, figures, legends and grids of images."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ..errors import MissingDependencyError, needs
from ..storage.files import replaced_file

# matplotlib is imported inside functions, so that the package loads without it
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.typing import ColorType

Layout: TypeAlias = Literal["constrained", "compressed"]
Style: TypeAlias = dict[str, Any]  # matplotlib's keyword arguments

# Okabe and Ito's eight colors, which people with any common color blindness tell apart, with dark gray for their black.
# Eight of Paul Tol's "muted" scheme and its neighbors follow. More could not be told apart, so colors repeat after 16.
EXPERT_COLORS = (
    *("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#555555"),
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#88CCEE", "#DDCC77"),
)
SHARED_COLOR = "#FFFFFF"  # for images that only the shared expert processes
CATEGORIES = len(EXPERT_COLORS)  # the number of colors that can be told apart
# Lines and classes take the dark colors first, because thin pale lines on white are hard to see
_CATEGORY_ORDER = (4, 5, 2, 0, 6, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15, 3)

DPI = 150
GRID_DPI = 100  # of grids of images, whose files are large
NARROW, LEGIBLE = 400, 8  # text is at least 8 pixels high when a picture is shown 400 pixels wide, as on phones
GRID_SIDE = 1.45  # inches, of an image in a grid
MAX_LETTERS = 60  # longer names are cut in the middle
LETTER_WIDTH = 0.6  # mean width of a letter over the font size

STYLE: Any = {  # matplotlib's rcParams
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "xtick.labelsize": "medium",
    "ytick.labelsize": "medium",
    "legend.fontsize": "medium",
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "text.parse_math": False,  # names are printed literally, dollar signs too
}
LEGEND_BELOW: Style = {"loc": "outside lower center", "ncols": 3, "columnspacing": 1.0}  # of a whole figure
_logger = logging.getLogger(__name__)


def expert_color(index: int) -> str:
    """Returns an expert's color as #RRGGBB; a negative index stands for no routed expert."""
    return EXPERT_COLORS[index % CATEGORIES] if index >= 0 else SHARED_COLOR


def category_color(index: int) -> str:
    """Returns the color of a class, a domain or a line as #RRGGBB."""
    return EXPERT_COLORS[_CATEGORY_ORDER[index % CATEGORIES]]


def text_size(width: float) -> float:
    """Font size in points for a picture of this width in inches: legible at 400 pixels, and between 9 and 16."""
    return min(max(72 * LEGIBLE / NARROW * width, 9.0), 16.0)


def fitted(name: str, width: int) -> str:
    """Wraps a name into lines of at most `width` letters; the middle of a very long name is left out.

    Lines break at spaces, hyphens, underscores and slashes, and within a word only if it is longer than a line.
    """
    if len(name) > MAX_LETTERS:
        name = f"{name[: MAX_LETTERS // 2 - 2]}...{name[-MAX_LETTERS // 2 + 2 :]}"
    # The vertical tab is a space to textwrap, and in no name
    lines = wrap(re.sub(r"([_/])(?=\w)", "\\1\v", name), width, replace_whitespace=False)
    text = "\n".join(lines).replace("\v", "") or " "
    return f" {text}" if text.startswith("_") else text  # matplotlib's legends leave such labels out


@contextmanager
def picture(
    path: Path, width: float, height: float, layout: Layout = "constrained", dpi: int = DPI
) -> Iterator["Figure"]:
    """Yields a styled figure of this size in inches, and writes it to `path` when the block ends.

    Raises MissingDependencyError without matplotlib.
    """
    with needs("drawing", "matplotlib", "plots"):
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), layout=layout)
    colors = cycler(color=[category_color(index) for index in range(CATEGORIES)])
    with rc_context({**STYLE, "font.size": text_size(width), "axes.prop_cycle": colors}):
        yield figure
        with replaced_file(path) as fresh:
            # The compressed layout leaves too little room for the labels of square axes
            box = "tight" if layout == "compressed" else None
            figure.savefig(fresh, format=path.suffix.removeprefix(".") or "png", dpi=dpi, bbox_inches=box)


@contextmanager
def optional_picture(path: Path) -> Iterator[Path]:
    """Yields the picture's path. If drawing fails, a partly written file is removed and a warning names the reason."""
    try:
        yield path
    except (MissingDependencyError, OSError) as error:
        path.unlink(missing_ok=True)
        _logger.warning(f"{path.name} is not drawn: {error}")


@contextmanager
def image_grid(
    path: Path, rows: Sequence[str], columns: Sequence[str], extra: float = 0.0
) -> Iterator[tuple["Figure", np.ndarray]]:
    """Yields a figure and axes (rows, columns) of square panels, above `extra` lines of text for a legend."""
    width = 0.6 + GRID_SIDE * len(columns)
    size = text_size(width)
    letters = max(6, int(72 * GRID_SIDE / (LETTER_WIDTH * size)))  # that fit beside or above a panel
    titles = [fitted(name, letters) for name in columns]
    lines = extra + max(title.count("\n") + 1 for title in titles)
    height = 0.2 + GRID_SIDE * len(rows) + lines * 1.4 * size / 72
    with picture(path, width, height, dpi=GRID_DPI) as figure:
        panels = figure.subplots(len(rows), len(columns), squeeze=False)
        for axes in panels.flat:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, name in zip(panels[:, 0], rows, strict=True):
            axes.set_ylabel(fitted(name, letters))
        for axes, title in zip(panels[0], titles, strict=True):
            axes.set_title(title)
        yield figure, panels


def write_numbers(axes: "Axes", image: Any, values: np.ndarray, **style: Any) -> None:
    """Writes numbers into the cells of an image, in white on dark cells. NaN stays empty."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5  # luma of ITU-R BT.601
            color = "white" if is_dark else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, **style)


def swatch(color: "ColorType", label: str) -> "Patch":
    """Returns a legend entry with a filled rectangle."""
    from matplotlib.patches import Patch

    return Patch(facecolor=color, edgecolor="gray", linewidth=0.5, label=label)


def line_handle(label: str, **style: Any) -> "Line2D":
    """Returns a legend entry with a line or marker, gray by default."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": "#555555", **style})
