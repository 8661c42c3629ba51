"""Pictures in a report as data URIs, and the reasons that replace missing pictures."""

import base64
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image

from ..analysis.style import new_figure
from ..errors import MoeDgError

Result = TypeVar("Result")
THUMBNAIL = 112  # pixels


class Picture(NamedTuple):
    """A picture inside the page, as a data URI with its text alternative."""

    uri: str
    alt: str
    width: int  # largest width on the page, pixels


class Missing(NamedTuple):
    """The reason why a section could not be made, which the page shows in its place."""

    reason: str


def attempt(make: Callable[[], Result]) -> Result | Missing:
    """Calls a function, and turns an expected error into `Missing` so that the rest of the page is written."""
    try:
        return make()
    except (MoeDgError, OSError) as error:
        return Missing(str(error))


def inlined(draw: Callable[[Path], object], alt: str, name: str = "picture.png") -> Picture | Missing:
    """Embeds a picture that `draw` writes to a path with this name, with its text alternative."""

    def make() -> Picture | Missing:
        new_figure(1, 1)  # raises the error that names the missing extra, before any work for the picture
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            try:
                draw(path)
            except MoeDgError:
                raise
            except ValueError as error:  # matplotlib parses a name with two dollar signs as a formula, which may fail
                return Missing(f"matplotlib cannot draw this: {str(error).strip().splitlines()[0]}")
            return picture_file(path, alt) if path.is_file() else Missing("There is nothing to draw.")

    return attempt(make)


def picture_file(path: Path, alt: str) -> Picture:
    """Embeds a PNG file with 256 colors, which is a third of the size."""
    with Image.open(path) as opened:
        image = opened.convert("RGB").quantize(256)
    return _encoded(image, alt, image.width * 2 // 3)  # drawn at 150 dots per inch, shown at 100


def thumbnail(image: Image.Image, alt: str) -> Picture:
    """Embeds a photograph at thumbnail size. Images of at most 64 pixels stay lossless."""
    small = image.copy()
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return _encoded(small, alt, THUMBNAIL, "PNG" if max(small.size) <= 64 else "JPEG")


def _encoded(image: Image.Image, alt: str, width: int, kind: str = "PNG") -> Picture:
    file = io.BytesIO()
    image.save(file, kind, optimize=True)
    return Picture(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}", alt, width)
