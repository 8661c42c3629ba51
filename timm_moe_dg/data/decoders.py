"""Formats of images that Pillow decodes by itself.

Its EPS reader starts Ghostscript, whatever a file's extension says.
"""

from functools import cache

from PIL import Image

DECODERS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")


@cache
def present() -> tuple[str, ...]:
    """Those of `DECODERS` that this Pillow was built with."""
    Image.init()
    return tuple(name for name in DECODERS if name in Image.OPEN)
