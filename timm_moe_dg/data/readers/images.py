"""Image files: listed below a folder, and decoded as RGB without starting other programs."""

import logging
import os
from typing import BinaryIO, NoReturn

import numpy as np
from PIL import Image, UnidentifiedImageError
from torchvision.datasets.folder import IMG_EXTENSIONS as IMAGE_EXTENSIONS

from ...errors import DataError, ImageReadError, check_regular_file
from ..bands import REPAIR, RGB, Pixels, as_picture, count_bands, installed_decoders, read_bands

SAMPLES_PER_PIXEL = 277  # the TIFF tag

_LOGGER = logging.getLogger(__name__)
_warned_bands: set[tuple[str, ...]] = set()


def images_below(folder: str) -> list[tuple[str, list[str]]]:
    """Lists folders and their image names, both sorted, to any depth, in the order of torchvision's ImageFolder.

    Hidden files and folders are skipped, such as the ._x.png that macOS writes beside x.png. Links to files are
    followed. Links to folders are errors: they could form a circle, or lead to images that are listed elsewhere.
    """
    listing = []
    for parent, folders, names in os.walk(folder, onerror=_raise_not_listed):
        folders[:] = [name for name in folders if not is_hidden(name)]  # os.walk enters those that remain
        for path in (os.path.join(parent, name) for name in folders):
            if os.path.islink(path):
                raise DataError(f"folder={path!r}: is a link, which is not followed here; put the images in its place")
        images = sorted(name for name in names if name.lower().endswith(IMAGE_EXTENSIONS) and not is_hidden(name))
        if images:
            listing.append((parent, images))
    return sorted(listing)


def is_hidden(path: str) -> bool:
    """Whether a file or folder has a name that starts with a dot."""
    return os.path.basename(path).startswith(".")


def subfolders(folder: str | os.PathLike[str]) -> list[str]:
    """Lists the names of a folder's folders, sorted, with links and without hidden ones. All must be UTF-8."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
    except OSError as error:
        _raise_not_listed(error)
    for name in names:
        # Python puts surrogates in place of bytes that it cannot decode, and these cannot be encoded.
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"folder={os.path.join(folder, name)!r}: its name is not UTF-8; rename it") from error
    return names


def read_image(path: str, file: BinaryIO | None = None) -> Image.Image:
    """Reads an image file, or an open file that `path` names in messages, as RGB.

    Other modes become RGB by PIL's `convert`, which drops transparency without blending. An EXIF rotation is ignored.
    Both are what torchvision's ImageFolder does, and DomainBed with it. Two cases differ. 16 bits become the upper 8,
    where torchvision clips at 255. A truncated file is an `ImageReadError`, where DomainBed fills in gray.
    """
    try:
        if file is None:
            check_regular_file(path)
        with Image.open(file or path, formats=installed_decoders()) as image:
            _check_bands(image)
            image.load()
            if len(image.getbands()) > 3:
                _warn_of_bands(image.getbands(), path)
            return image if image.mode == "RGB" else _as_rgb(image)
    except Exception as error:  # decoders raise any class on broken files: KeyError, IndexError, struct.error ...
        remedy = REPAIR
        if path.lower().endswith((".tif", ".tiff")) and isinstance(error, UnidentifiedImageError):
            count = count_bands(path)
            case = f"it has {count} bands" if count else "if it has more bands than four"
            remedy = f"{case}: give --in-chans {count or 'N'}, or save three of them as RGB; else {remedy}"
        raise ImageReadError(f"image={path!r}: cannot be decoded ({error}); {remedy}") from error


def read_pixels(path: str, in_chans: int = RGB) -> Pixels:
    """Reads an image file for a network with so many input channels (see `read_image` and `read_bands`)."""
    return read_image(path) if in_chans == RGB else read_bands(path, in_chans)


def read_picture(path: str, bands: int = RGB) -> Image.Image:
    """Reads an image file as an RGB picture for people, whatever its number of bands (see `as_picture`)."""
    return read_image(path) if bands == RGB else as_picture(read_bands(path, bands))


def _check_bands(image: Image.Image) -> None:
    """Raises for TIFF files with bands that Pillow would drop silently: from the fifth on, or in further pages."""
    tags = getattr(image, "tag_v2", {})  # only TIFF files have tags
    # Bands may be samples of one page, or pages of one sample each.
    in_page = tags.get(SAMPLES_PER_PIXEL, 1)
    bands = getattr(image, "n_frames", 1) if tags and in_page == 1 else in_page
    if bands > 4 or bands > in_page:
        raise ValueError(f"it has {bands} bands: give --in-chans {bands}, or save three of them as RGB")


def _warn_of_bands(bands: tuple[str, ...], path: str) -> None:
    """Warns once per process that images have more bands than are read."""
    if bands not in _warned_bands:
        _warned_bands.add(bands)
        remark = "read as three (RGB), without --in-chans; others like it are not mentioned"
        _LOGGER.warning("image=%r: has %d bands (%s), %s", path, len(bands), ", ".join(bands), remark)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode!r} has no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def _raise_not_listed(error: OSError) -> NoReturn:
    raise DataError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable") from error
