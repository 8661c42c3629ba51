"""What goes into a page beside text: pictures as data URIs, or a line that says why there is none."""

import base64
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image

from ..analysis.style import new_figure
from ..errors import MoeDgError

Made = TypeVar("Made")
THUMBNAIL = 112  # pixels


class Picture(NamedTuple):
    """A picture in the page itself.

    Attributes:
        uri: data:image/...;base64,...
        alt: What it shows, for those who do not see it.
        width: Pixels at which it is shown, at most.
    """

    uri: str
    alt: str
    width: int


class Missing(NamedTuple):
    """What stands in the place of something that could not be made.

    Attributes:
        reason: Why, and what helps.
    """

    reason: str


def attempt(make: Callable[[], Made]) -> Made | Missing:
    """Makes something, or says why it cannot be made: one section less, and the page goes on."""
    try:
        return make()
    except (MoeDgError, OSError) as error:
        return Missing(str(error))


def inlined(draw: Callable[[Path], object], alt: str, name: str = "picture.png") -> Picture | Missing:
    """Draws a picture with matplotlib and takes it into the page, in 256 colors, which makes it a third as large.

    Args:
        draw: Writes it; a function of a path.
        alt: What it shows.
        name: Of the file that is written.
    """

    def make() -> Picture | Missing:
        new_figure(1, 1)  # or the error that names the extra, before any work for the picture
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            try:
                draw(path)
            except MoeDgError:
                raise
            except ValueError as error:  # matplotlib reads names with two dollar signs as formulas, and not all are
                return Missing(f"matplotlib cannot draw this: {str(error).strip().splitlines()[0]}")
            return picture_file(path, alt) if path.is_file() else Missing("There is nothing to draw.")

    return attempt(make)


def picture_file(path: Path, alt: str) -> Picture:
    """Takes a PNG file into the page."""
    with Image.open(path) as opened:
        image = opened.convert("RGB").quantize(256)
    return _encoded(image, alt, image.width * 2 // 3)  # drawn at 150 dots per inch


def thumbnail(image: Image.Image, alt: str) -> Picture:
    """Takes a photograph into the page; a large one is reduced, and a tiny one enlarged by whole pixels."""
    small = image.copy()
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return _encoded(small, alt, THUMBNAIL, "PNG" if max(small.size) <= 64 else "JPEG")


def _encoded(image: Image.Image, alt: str, width: int, kind: str = "PNG") -> Picture:
    file = io.BytesIO()
    image.save(file, kind, optimize=True)
    return Picture(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}", alt, width)
