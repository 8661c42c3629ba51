"""The style of every picture: fonts, sizes and lines are set here alone. matplotlib is imported when one is drawn.

Text is as large as it has to be to be read where a picture is shown 400 pixels wide, as pages on phones show it.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import MissingDependencyError
from .palette import CATEGORIES, category_color

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.typing import ColorType

Layout: TypeAlias = Literal["constrained", "compressed"]

DPI = 150
NARROW, LEGIBLE = 400, 8  # pixels: of a narrow picture, and of text in it
Style: TypeAlias = dict[str, Any]  # matplotlib's keyword arguments

STYLE: Any = {  # keys as matplotlib lists them, with values of many types
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
    "text.parse_math": False,  # names are shown as they are, dollar signs too
}
LEGEND_BELOW: Style = {"loc": "outside lower center", "ncols": 3, "columnspacing": 1.0}  # of a whole figure
_logger = logging.getLogger(__name__)


def text_size(width: float) -> float:
    """Points of text in a picture of so many inches: 8 pixels high once it is 400 wide, but 9 to 16."""
    return min(max(72 * LEGIBLE / NARROW * width, 9.0), 16.0)


def new_figure(width: float, height: float, layout: "Layout" = "constrained") -> "Figure":
    """Returns an empty figure of a size in inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError.of("drawing", "matplotlib", "plots") from error
    return Figure(figsize=(width, height), layout=layout)


@contextmanager
def styled(width: float, height: float, layout: "Layout" = "constrained") -> Iterator["Figure"]:
    """Opens a figure of a size in inches in the style of this module, for as long as it is drawn and written.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figure = new_figure(width, height, layout)
    from cycler import cycler
    from matplotlib import rc_context

    colors = cycler(color=[category_color(number) for number in range(CATEGORIES)])
    with rc_context({**STYLE, "font.size": text_size(width), "axes.prop_cycle": colors}):
        yield figure


@contextmanager
def picture(path: Path, width: float, height: float, layout: "Layout" = "constrained") -> Iterator["Figure"]:
    """Opens a styled figure, and writes it as a picture once it is drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with styled(width, height, layout) as figure:
        yield figure
        # Beside squares the layout leaves labels too little room
        figure.savefig(path, dpi=DPI, bbox_inches="tight" if layout == "compressed" else None)


def swatch(color: "ColorType", label: str) -> "Patch":
    """Returns a legend's entry of one color."""
    from matplotlib.patches import Patch

    return Patch(facecolor=color, label=label)


def line_handle(label: str, **style: Any) -> "Line2D":
    """Returns a legend's entry of a line or marker, gray unless it has a color."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"color": "#555555", **style})


def legend_below(axes: "Axes", handles: Sequence["Artist"], columns: int = 2) -> None:
    """Puts a legend below a panel."""
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=columns, columnspacing=1.0)


@contextmanager
def optional_picture(path: Path) -> Iterator[Path]:
    """Lets work go on without the picture that is drawn inside: where it cannot be, a message says why.

    Args:
        path: Of the picture, and what is yielded; half of one is removed.
    """
    try:
        yield path
    except (MissingDependencyError, OSError) as error:
        path.unlink(missing_ok=True)
        _logger.warning(f"{path.name} is not drawn: {error}")
