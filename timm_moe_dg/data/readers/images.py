"""Image files: listed below a folder, and decoded without starting other programs."""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import BinaryIO, NoReturn

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ...errors import DataError, ImageReadError, MissingDependencyError, check_regular_file
from ..band_names import RGB, Bands, describes_rgb, pick
from ..bands import (
    ORIENTATION,
    PHOTOMETRIC,
    REPAIR,
    SAMPLES_PER_PIXEL,
    Pixels,
    Source,
    TiffNotes,
    decoders,
    full_images,
    image_extensions,
    is_eight_bit,
    is_tiff,
    missing_values,
    read_values,
    scaled,
    tiff_notes,
    turned,
)

MAX_KINDS = 8  # in a message
MANY_TIMES = 16  # sides of a network's input, from which details are lost; photographs of telephones have fewer
# Written beside images by macOS's archives, Windows and network drives
SYSTEM_NAMES = {"__macosx", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r", "@eadir", "@tmp"}
SYSTEM_NAMES |= {"@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin", "system volume information"}
SYSTEM_NAMES |= {"lost+found", "network trash folder", "temporary items", "__pycache__"}

_LOGGER = logging.getLogger(__name__)
_warned: set[object] = set()


def images_below(folder: str, left_out: Counter[str] | None = None) -> list[tuple[str, list[str]]]:
    """Lists folders and their image names, both sorted, to any depth, in the order of torchvision's ImageFolder.

    Images are files with an extension that Pillow reads. `left_out` counts the others by their extension. Hidden files
    and folders are skipped, see `is_hidden`. Links to files are followed. Links to folders are errors: they could form
    a circle, or lead to images that are listed elsewhere.
    """
    listing: dict[str, list[str]] = {}
    for parent, name in walk_images(folder, left_out):
        listing.setdefault(parent, []).append(name)
    return sorted(listing.items())


def walk_images(folder: str, left_out: Counter[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yields the (folder, name) of `images_below` in the order of their paths, with one folder's names in memory."""
    suffixes = image_extensions()
    try:
        with os.scandir(folder) as entries:
            # With the separator, names of folders sort as paths do
            names = sorted(entry.name + os.sep * entry.is_dir() for entry in entries if not is_hidden(entry.name))
    except OSError as error:
        _raise_not_listed(error)
    for name in names:
        path = os.path.join(folder, name.removesuffix(os.sep))
        if name.endswith(os.sep):
            if os.path.islink(path):
                raise DataError(f"folder={path!r}: is a link, which is not followed here; put the images in its place")
            yield from walk_images(path, left_out)
        elif name.lower().endswith(suffixes):
            yield folder, name
        elif left_out is not None:
            left_out[kind_of(name)] += 1


def kind_of(name: str) -> str:
    """Names the kind of a file by its extension, such as ".heic"."""
    return os.path.splitext(name)[1].lower() or "no extension"


def describe_left_out(left_out: Counter[str]) -> str:
    """Counts files that are no images by their kind."""
    return f"left out, since Pillow does not read such files: {count_kinds(left_out)}"


def count_kinds(counts: Counter[str]) -> str:
    """Lists the most frequent kinds of files with their numbers."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common(MAX_KINDS))
    return kinds + (f" and {len(counts) - MAX_KINDS} more kinds" if len(counts) > MAX_KINDS else "")


def is_hidden(path: str) -> bool:
    """Whether a file or folder starts with a dot, such as ._x.png of macOS, or belongs to an operating system."""
    name = os.path.basename(path)
    return name.startswith(".") or name.casefold().partition(":")[0] in SYSTEM_NAMES


def subfolders(folder: str | os.PathLike[str]) -> list[str]:
    """Lists the names of a folder's folders, sorted, with links and without hidden ones. All must be UTF-8."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not is_hidden(entry.name)]
            names = sorted(entry.name for entry in visible if entry.is_dir())
            if broken := sorted(entry.path for entry in visible if not os.path.exists(entry.path)):
                _LOGGER.warning("links to nothing are left out: %s", ", ".join(broken))
    except OSError as error:
        _raise_not_listed(error)
    for name in names:
        # Python puts surrogates in place of bytes that it cannot decode, and these cannot be encoded.
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"folder={os.path.join(folder, name)!r}: its name is not UTF-8; rename it") from error
    return names


def read_pixels(path: str, bands: Bands = RGB, *, file: BinaryIO | None = None, upright: bool = True) -> Pixels:
    """Reads an image file, or an open file that `path` names in messages, for a network of these bands.

    Three bands are an RGB image if the file has 8 bits. Transparency is dropped without blending, as torchvision's
    ImageFolder does. Files of more bits or with missing data, and other bands, become float32 (bands, height, width),
    see `data.bands`, with NaN for missing data. A gray file of more bits has its band three times.

    Args:
        path: The file.
        bands: Number of bands that the file must have, if it is not three, or their full names (`data.band_names`).
            Bands that a TIFF file describes are picked by name.
        file: The content, instead of the file at `path`.
        upright: Apply the EXIF orientation. DomainBed does not.

    Raises:
        ImageReadError: The file is damaged, has other bands, or no data in more than half of its pixels.
    """
    try:
        if file is None:
            check_regular_file(path)
        if bands == RGB:
            return _read_rgb(path, file or path, upright)
        return _read_bands(path, file or path, bands, upright)
    except (ImageReadError, MissingDependencyError):
        raise
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        remedy = "cut it into tiles, or leave the file out"
        raise ImageReadError(f"image={path!r}: is larger than {limit:,} pixels; {remedy}") from error
    except Exception as error:  # decoders raise any class on broken files: KeyError, IndexError, struct.error ...
        is_missing = "imagecodecs" in str(error) or isinstance(error, ImportError)  # or Python's own Zstandard
        remedy = "pip install imagecodecs" if is_missing else REPAIR
        raise ImageReadError(f"image={path!r}: cannot be decoded ({error}); {remedy}") from error


def warn_if_squeezed(path: str, pixels: Pixels, view: Tensor) -> None:
    """Warns once per process of an image that is many times its view (C, height, width), the input of a network."""
    if view.ndim != 3 or not view.numel():  # views of an ensemble are flat
        return
    size = view.shape[1:]
    width, height = pixels.size if isinstance(pixels, Image.Image) else (pixels.shape[2], pixels.shape[1])
    ratio = min(height / size[0], width / size[1])
    if ratio >= MANY_TIMES:
        remark = f"has {width} x {height} pixels, {ratio:.0f} times the input of {size[1]} x {size[0]}"
        _warn_once(path, f"{remark}, and is squeezed to it: cut scenes into tiles, or raise --img-size", "squeezed")


def has_deep_values(path: str) -> bool:
    """Whether a file has other values than 8-bit ones, by its first bytes. False if it cannot be opened."""
    try:
        check_regular_file(path)
        with _opened(path) or nullcontext() as image:
            return not is_eight_bit(image, path)
    except Exception:  # the image is refused when it is read
        return False


def _read_rgb(path: str, source: Source, upright: bool) -> Pixels:
    image = _opened(source)
    with image or nullcontext():
        _warn_of_images(path, image, source)
        if image is not None and is_eight_bit(image, source) and _band_pages(image, source) != RGB:
            return _eight_bit(path, source, image, upright)
        values, transparent, notes = _values(source, image, upright)
    if transparent:
        _warn_of_bands(path, len(values))
        values = values[:-1]
    warn_of_order(path, notes.first_names)
    return rgb_pixels(path, values, missing_values(values, notes.nodata, notes.mask))


def rgb_pixels(path: str, values: np.ndarray, missing: np.ndarray | None) -> Pixels:
    """Turns values (1 or 3, height, width) into an RGB image of 8 bits, or `scaled` ones if some are missing."""
    if len(values) not in (1, RGB):
        raise ValueError(_too_many(len(values)))
    values = np.repeat(values, RGB // len(values), axis=0)
    if values.dtype == np.uint8 and missing is None:
        return Image.fromarray(np.ascontiguousarray(values.transpose(1, 2, 0)))
    if values.dtype != np.uint8:
        _warn_once(path, f"holds {values.dtype} values, which are read in full depth", values.dtype)
    return scaled(path, values, None if missing is None else np.broadcast_to(missing, values.shape))


def _eight_bit(path: str, source: Source, image: Image.Image, upright: bool) -> Pixels:
    notes = tiff_notes(image, source)
    warn_of_order(path, notes.first_names)
    image.load()
    if upright:
        ImageOps.exif_transpose(image, in_place=True)
    count = getattr(image, "tag_v2", {}).get(SAMPLES_PER_PIXEL, 1)
    if max(count, len(image.getbands())) > RGB:  # of four bands in a TIFF file Pillow may show three
        _warn_of_bands(path, max(count, len(image.getbands())), image.getbands())
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if notes.nodata is None and notes.mask is None:
        return rgb
    missing = missing_values(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), notes.nodata, notes.mask)
    if missing is None:
        return rgb
    return rgb_pixels(path, np.asarray(rgb).transpose(2, 0, 1), missing[: RGB if len(missing) >= RGB else 1])


def _read_bands(path: str, source: Source, bands: Bands, upright: bool) -> Tensor:
    image = _opened(source)
    with image or nullcontext():
        _warn_of_images(path, image, source)
        values, _, notes = _values(source, image, upright)
    positions = pick(path, [notes.descriptions.get(band) for band in range(len(values))], len(values), bands)
    values = values[list(positions)]
    return scaled(path, values, missing_values(values, notes.nodata, notes.mask))


def _values(source: Source, image: Image.Image | None, upright: bool) -> tuple[np.ndarray, bool, TiffNotes]:
    """All values of a file, whether the last band is transparency, and GDAL's notes."""
    tags = getattr(image, "tag_v2", None)
    if image is None or tags is None:
        values, transparent = read_values(source, image)
        if image is not None and upright:
            values = turned(values, image.getexif().get(ORIENTATION, 1))
        return values, transparent, tiff_notes(image, source)
    # Pillow misreads many other TIFF files of more than 8 bits. These it reads without further packages.
    is_gray = image.mode.startswith("I;16") and tags.get(PHOTOMETRIC) == tags.get(SAMPLES_PER_PIXEL, 1) == 1
    is_single = is_gray and full_images(image, source) == 1
    notes = tiff_notes(image, source)
    return *read_values(source, image if is_single else None), notes


def _opened(source: Source) -> Image.Image | None:
    """The file as Pillow opens it; None for TIFF files that Pillow does not know."""
    logging.getLogger("PIL.TiffImagePlugin").setLevel(logging.CRITICAL)  # it reports each file that it does not know
    try:
        image = Image.open(source, formats=decoders())
    except UnidentifiedImageError:
        if not is_tiff(source):
            raise
        return None
    if getattr(image, "tag_v2", {}).get(ORIENTATION, 1) > 4:
        image.filename = ""  # Pillow would map it into memory with height and width exchanged
    return image


def _band_pages(image: Image.Image, source: Source) -> int:
    """Counts the pages that are bands of one image, and refuses bands that Pillow would drop: from the fifth on."""
    tags = getattr(image, "tag_v2", {})  # only TIFF files have tags
    in_page = tags.get(SAMPLES_PER_PIXEL, 1)
    pages = full_images(image, source) if tags and in_page == 1 else 1
    count = max(pages, in_page)
    if count > 4 or (count > in_page and pages != RGB):
        raise ValueError(_too_many(count))
    return pages


def _warn_of_images(path: str, image: Image.Image | None, source: Source) -> None:
    """Warns of a file of several images. Pages of one band each are the bands of one."""
    is_band = getattr(image, "tag_v2", {}).get(SAMPLES_PER_PIXEL, RGB) == 1
    if image is not None and image.format != "MPO" and not is_band and full_images(image, source) > 1:
        _warn_once(path, "holds several images, of which the first is read", image.format)


def _too_many(bands: int) -> str:
    return f"it has {bands} bands: give --in-chans {bands}, or save three of them as RGB"


def _warn_of_bands(path: str, count: int, names: tuple[str, ...] = ()) -> None:
    listed = f" ({', '.join(names)})" if names else ""
    _warn_once(path, f"has {count} bands{listed}, read as three (RGB), without --in-chans", (count, names))


def warn_of_order(path: str, names: Sequence[str]) -> None:
    """Warns of a file, read as RGB, whose first three bands have other names."""
    if not describes_rgb(names):
        _warn_once(path, f"describes its bands as {', '.join(names)}, read as RGB; name them with --bands", str(names))


def _warn_once(path: str, remark: str, kind: object) -> None:
    """Warns once per process and kind."""
    if kind not in _warned:
        _warned.add(kind)
        _LOGGER.warning("image=%r: %s; others like it are not mentioned", path, remark)


def _raise_not_listed(error: OSError) -> NoReturn:
    raise DataError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable") from error
