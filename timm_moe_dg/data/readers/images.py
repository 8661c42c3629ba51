"""Image files: found below a folder, and decoded as RGB without the help of other programs."""

import logging
import os
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from ...errors import DataError, ImageReadError
from .. import decoders
from ..bands import as_picture, bands_in, read_bands
from ..pixels import IMAGE_EXTENSIONS, RGB, Pixels

SAMPLES_PER_PIXEL = 277  # the TIFF tag

_SAID: set[tuple[str, ...]] = set()
_LOGGER = logging.getLogger(__name__)


def images_below(folder: str) -> list[tuple[str, list[str]]]:
    """Lists files with torchvision's image extensions, to any depth, in the order of its ImageFolder.

    Links to files are followed. Links to folders are refused: they could lead around in a circle, or to images that are
    found elsewhere as well.

    Returns:
        Folders and the names of their images, both sorted; folders without images are left out.

    Raises:
        DataError: A folder cannot be listed, or is a link.
    """
    found = []
    for parent, folders, names in os.walk(folder, onerror=_not_listed):
        for path in (os.path.join(parent, name) for name in folders):
            if os.path.islink(path):
                raise DataError(f"folder={path!r}: is a link, which is not followed here; put the images in its place")
        images = sorted(name for name in names if name.lower().endswith(IMAGE_EXTENSIONS))
        found += [(parent, images)] if images else []
    return sorted(found)


def subfolders(folder: str | os.PathLike[str]) -> list[str]:
    """Lists the names of a folder's folders, sorted; links to folders are among them.

    Raises:
        DataError: The folder cannot be listed, or holds a folder whose name is not UTF-8: it would be the name of a
            domain or a class.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        _not_listed(error)
        raise
    for name in names:
        if not _is_utf_8(name):
            raise DataError(f"folder={os.path.join(folder, name)!r}: its name is not UTF-8; rename it")
    return names


def read_image(path: str, file: BinaryIO | None = None) -> Image.Image:
    """Reads an image file as RGB.

    Other modes become RGB as PIL's `convert` makes them, so transparency is dropped and not blended; an EXIF rotation
    is ignored. Both are what torchvision's ImageFolder does, and DomainBed with it. It is not followed in two things:
    16 bits become the upper 8, which it cuts off at 255, and a truncated file is an error, whose missing part DomainBed
    fills with gray.

    Args:
        path: The file, and its name in messages.
        file: Where to read instead of opening `path`.

    Raises:
        ImageReadError: The file cannot be decoded, is of a format not in `decoders.DECODERS`, or is no regular file.
    """
    try:
        if file is None:
            decoders.check_regular(path)
        with Image.open(file or path, formats=decoders.present()) as image:
            _check_bands(image)
            image.load()
            if len(image.getbands()) > 3:
                _say_bands(image.getbands(), path)
            return image if image.mode == "RGB" else _as_rgb(image)
    except Exception as error:  # decoders raise what they like on broken files: KeyError, IndexError, struct.error ...
        remedy = decoders.REPAIR
        if path.lower().endswith((".tif", ".tiff")) and isinstance(error, UnidentifiedImageError):
            count = bands_in(path)
            has = f"it has {count} bands" if count else "if it has more bands than four"
            remedy = f"{has}: give --in-chans {count or 'N'}, or save the three that count as RGB; else {remedy}"
        raise ImageReadError(f"image={path!r}: cannot be decoded ({error}); {remedy}") from error


def read_pixels(path: str, in_chans: int = RGB) -> Pixels:
    """Reads an image file as a network of so many channels takes it; see `read_image` and `read_bands`."""
    return read_image(path) if in_chans == RGB else read_bands(path, in_chans)


def read_picture(path: str, bands: int = RGB) -> Image.Image:
    """Reads an image file as RGB for people: of other bands than three, see `as_picture`."""
    return read_image(path) if bands == RGB else as_picture(read_bands(path, bands))


def _check_bands(image: Image.Image) -> None:
    """Refuses what Pillow would drop without a word: a TIFF file's bands from the fifth on, between, or in pages."""
    tags = getattr(image, "tag_v2", {})  # of TIFF files alone
    in_page = tags.get(SAMPLES_PER_PIXEL, 1)
    bands = getattr(image, "n_frames", 1) if tags and in_page == 1 else in_page
    if bands > 4 or bands > in_page:
        raise ValueError(f"it has {bands} bands: give --in-chans {bands}, or save the three that count as RGB")


def _say_bands(bands: tuple[str, ...], path: str) -> None:
    """Says once, in each process, that images have more bands than are read."""
    if bands not in _SAID:
        _SAID.add(bands)
        remark = "read as three (RGB), without --in-chans; others like it are not mentioned"
        _LOGGER.warning("image=%r: has %d bands (%s), %s", path, len(bands), ", ".join(bands), remark)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode!r} has no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _is_utf_8(name: str) -> bool:
    """Whether a name has no bytes that Python had to put surrogates in the place of."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_listed(error: OSError) -> None:
    raise DataError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable") from error
