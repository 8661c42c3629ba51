"""What every picture begins with. matplotlib is needed here alone, and imported when a picture is drawn."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.typing import ColorType

DPI = 150
_logger = logging.getLogger(__name__)


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError.of("drawing", "matplotlib", "plots") from error
    return Figure(figsize=(width, height), layout="constrained")


def swatch(color: "ColorType", label: str) -> "Patch":
    """Returns a legend's entry of one color."""
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)


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
