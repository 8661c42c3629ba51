"""What is opened as an image: regular files, of formats that Pillow decodes by itself.

Its EPS reader starts Ghostscript, whatever a file's extension says.
"""

import os
from functools import cache

from PIL import Image

DECODERS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")

REPAIR = "repair or remove the file, or give --skip-unreadable"


def check_regular(path: str) -> None:
    """Refuses what is there and no file; to open a named pipe would wait for a writer.

    Raises:
        ValueError: It is.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("no regular file")


@cache
def present() -> tuple[str, ...]:
    """Those of `DECODERS` that this Pillow was built with."""
    Image.init()
    return tuple(name for name in DECODERS if name in Image.OPEN)
