"""Values of image files: 8-bit RGB, other numbers of bands, 16 bits and floating-point numbers.

One recipe holds for training, prediction and export. Integers are divided by the largest value of their type, so that
8, 16 and 32 bits reach up to 1. Floating-point numbers are unchanged. No file starts another program.
"""

import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor

from ...errors import ImageReadError, MissingDependencyError, check_regular_file, needs
from ..bands import RGB, Bands, describes_rgb

Pixels: TypeAlias = Image.Image | Tensor  # RGB, or float (bands, height, width)
Transform: TypeAlias = Callable[[Pixels], Tensor]
Source: TypeAlias = str | BinaryIO
REPAIR = "repair or remove the file, or give --skip-unreadable"
_EXTERNAL = ("EPS",)  # formats whose decoder starts another program (Ghostscript), whatever the file's extension
_WITHOUT_IMAGES = ("MPEG",)  # formats that Pillow identifies and cannot decode
_EIGHT_BIT = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_WHOLE_MODES = ("L", "LA", "RGB", "RGBA")  # 8-bit modes whose values are those in the file
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Formats that Pillow reduces to 8 bits: a marker, the place of the byte behind it that tells the depth, and its meaning
_DEPTHS: dict[str | None, tuple[bytes, int, Callable[[int], bool]]] = {
    "AVIF": (b"av1C", 6, lambda flags: bool(flags & 0x40)),
    "JPEG2000": (b"\xff\x4f\xff\x51", 42, lambda depth: depth & 0x7F >= 8),  # bits of the first component, minus one
}
_STRETCHED_PERCENTILES = (2, 98)
MOST_MISSING = 0.5  # share of a band's pixels
_LARGEST_VALUE = 1e30  # beyond are only markers of missing data, such as -3.4e38
# TIFF tags
BITS, COMPRESSION, PHOTOMETRIC, ORIENTATION, SAMPLES_PER_PIXEL, SAMPLE_FORMAT = 258, 259, 262, 274, 277, 339
SUBFILE, WIDTH, HEIGHT, EXTRA_SAMPLES = 254, 256, 257, 338
METADATA, NODATA = 42112, 42113  # of GDAL
_NOTES = (ORIENTATION, NODATA, METADATA, PHOTOMETRIC, SAMPLE_FORMAT, BITS)
MASK = 4  # value of SUBFILE
_PALETTE, _YCBCR = 3, 6  # values of PHOTOMETRIC
_INDIRECT_COLORS = (_PALETTE, 5, _YCBCR, 8, 9, 10)  # also CMYK and kinds of L*a*b*
_REDUCED_OR_MASK = 1 | 4  # bits of SUBFILE: an overview, or a mask, and no image of its own
MANY_TIMES = 16  # sides of a network's input, from which details are lost; photographs of telephones have fewer
_LOGGER = logging.getLogger(__name__)
_warned: set[object] = set()


@cache
def decoders() -> tuple[str, ...]:
    """Returns the names of the formats that this Pillow decodes by itself."""
    Image.init()
    factories = {name: factory for name, (factory, _) in Image.OPEN.items() if isinstance(factory, type)}
    stubs = {name for name, factory in factories.items() if issubclass(factory, ImageFile.StubImageFile)}
    names = set(Image.OPEN) - stubs - {*_EXTERNAL, *_WITHOUT_IMAGES}
    return tuple(sorted(names, key=lambda name: (name not in ("JPEG", "PNG"), name)))  # the most frequent ones first


@cache
def image_extensions() -> tuple[str, ...]:
    """Returns the extensions of files that `decoders` read, in lower case, such as ".jpg"."""
    readable = {*decoders(), "MPO"}  # files of several JPEG images, which the reader of JPEG opens
    return tuple(sorted(suffix for suffix, name in Image.registered_extensions().items() if name in readable))


def is_tiff(source: Source) -> bool:
    """Whether a file starts as TIFF and BigTIFF files do."""
    return _head(source, 4) in _TIFF_STARTS


def is_eight_bit(image: Image.Image | None, source: Source) -> bool:
    """Whether RGB of 8 bits holds all bits of a file. `image` is None for a TIFF file that Pillow does not know."""
    if image is None:
        with _tiff_file(source) as file:
            return bool(file.pages[0].dtype == np.uint8)
    if image.mode not in _EIGHT_BIT:
        return False
    if tags := getattr(image, "tag_v2", None):
        return max(tags.get(BITS, (1,))) <= 8 and max(tags.get(SAMPLE_FORMAT, (1,))) == 1
    if image.format in _DEPTHS:
        marker, place, is_deep = _DEPTHS[image.format]
        _, found, rest = _head(source, 1 << 20).partition(marker)
        return not found or not is_deep(rest[place - len(marker)])
    codec, arguments = next(((tile[0], tile[3]) for tile in getattr(image, "tile", ())), ("", None))
    rawmode, *further = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec == "SGI16" or (codec in ("ppm", "ppm_plain") and further and further[0] > 255):
        return False
    return ";16" not in str(rawmode) or str(rawmode).startswith("BGR")  # "BGR;16" packs a pixel into 16 bits


def read_values(source: Source, image: Image.Image | None) -> tuple[np.ndarray, bool]:
    """Reads all values of a file, (bands, height, width), and whether the last band is transparency.

    `image` is the file as Pillow opened it, or None for a TIFF file, of which Pillow misreads many.
    """
    if image is None:
        return _tiff_values(source)
    if image.mode in _EIGHT_BIT and not is_eight_bit(image, source):
        if image.format != "PNG":
            raise ValueError(f"a {image.format} file of more than 8 bits per value; save it as PNG or TIFF")
        from torchvision.io import ImageReadMode, decode_image  # which a later release moves elsewhere

        values = decode_image(torch.frombuffer(bytearray(_head(source)), dtype=torch.uint8), ImageReadMode.UNCHANGED)
        return values.numpy(), len(values) in (2, 4)
    if image.mode in _EIGHT_BIT and image.mode not in _WHOLE_MODES:
        raise ValueError(f"mode {image.mode!r} holds no bands; save it as TIFF")
    image.load()  # which may turn it
    values = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    if image.mode == "I" and image.format in ("PNG", "PPM"):  # 16 bits in Pillow's 32
        values = values.astype(np.uint16)
    return values, image.mode in ("LA", "RGBA")


def scaled(path: str, values: np.ndarray, missing: np.ndarray | None = None) -> Tensor:
    """Scales (bands, height, width) to float32, with NaN at `missing` values, which transforms turn into the mean.

    A band without data in more than half of its pixels is an `ImageReadError`.
    """
    shares = np.zeros(len(values)) if missing is None else missing.mean(axis=(1, 2))
    if shares.max() > MOST_MISSING:
        band = int(shares.argmax())
        raise ImageReadError(
            f"image={path!r}: {shares[band]:.0%} of band {band + 1} are without data (nodata); {REPAIR}"
        )
    if values.dtype.kind not in "iuf":
        raise ImageReadError(f"image={path!r}: has values of the type {values.dtype}; save it as numbers")
    divisor = np.float32(np.iinfo(values.dtype).max if values.dtype.kind in "iu" else 1)
    # Of floating-point numbers, those without data may be too large for float32
    present = values if missing is None or values.dtype.kind != "f" else np.where(missing, values.dtype.type(0), values)
    numbers = present.astype(np.float32) / divisor
    if missing is not None:
        numbers[missing] = np.nan
    return torch.from_numpy(numbers)


def missing_values(values: np.ndarray, nodata: float | None, mask: np.ndarray | None) -> np.ndarray | None:
    """Marks values (bands, height, width) without data; None if there are none.

    These are the value `nodata`, numbers that are not finite, and pixels of a bool `mask` (height, width).
    """
    missing = np.zeros(values.shape, bool) if mask is None else np.broadcast_to(mask, values.shape)
    if nodata is not None and np.isfinite(nodata):
        # The tag holds a text, whose number may round to the one that is stored
        number = np.float64(nodata) if values.dtype.kind in "iu" else np.array(nodata).astype(values.dtype)
        missing = missing | (values == number)
    if values.dtype.kind == "f":
        missing = missing | ~(np.abs(values) <= min(_LARGEST_VALUE, float(np.finfo(values.dtype).max)))
    return missing if missing.any() else None


class TiffNotes(NamedTuple):
    """What GDAL writes beside the values of a TIFF file."""

    nodata: float | None = None  # the value that marks missing data
    descriptions: Mapping[int, str] = MappingProxyType({})  # by position of the band
    mask: np.ndarray | None = None  # bool (height, width), True where data is missing
    first_names: Sequence[str] = ("",) * RGB  # of the first three bands: their descriptions, else their colors


def tiff_notes(image: Image.Image | None, source: Source) -> TiffNotes:
    """Reads GDAL's notes in a file. `image` is None for a TIFF file that Pillow does not know."""
    if image is not None and image.format != "TIFF":
        return TiffNotes()
    if image is not None and not any(kind == MASK for kind, _ in _pages(image, source)):
        tags, mask = [image.tag_v2.get(tag) for tag in _NOTES], None  # type: ignore[attr-defined]
    else:  # Pillow reads no masks
        with _tiff_file(source) as file:
            tags = [file.pages[0].tags.valueof(tag) for tag in _NOTES]
            page = next((page for page in file.pages[1:] if page.tags.valueof(SUBFILE) == MASK), None)
            mask = None if page is None else page.asarray() == 0
    orientation, nodata, metadata, photometric, sample_format, bits = tags
    if mask is not None:
        mask = turned(mask[None], orientation or 1)[0]
    items = re.findall(r'<Item name="(\w+)" sample="(\d+)" role="\w+">([^<]*)<', str(metadata))
    kinds = ("DESCRIPTION", "COLORINTERP")
    names, colors = ({int(band): text for name, band, text in items if name == kind} for kind in kinds)
    try:
        value = float(str(nodata).strip(" \0"))
        if photometric == 0 and np.max(sample_format or 1) == 1:  # zero is white, and values are read inverted
            value = 2.0 ** int(np.max(bits)) - 1 - value
    except ValueError:
        value = None
    return TiffNotes(value, names, mask, [names.get(band) or colors.get(band, "") for band in range(RGB)])


def full_images(image: Image.Image, source: Source) -> int:
    """Counts the images in an open file. In TIFF files they have the size of the first and are no overview or mask."""
    if image.format != "TIFF":
        return getattr(image, "n_frames", 1)
    sizes = [size for kind, size in _pages(image, source) if not kind & _REDUCED_OR_MASK]
    return sizes.count(sizes[0]) if sizes else 1


def _pages(image: Image.Image, source: Source) -> list[tuple[int, object]]:
    """The value of SUBFILE and the size of each page of an open TIFF file. The first one counts as an image."""
    if not getattr(image, "is_animated", False):
        return [(0, image.size)]
    content, pages, places = io.BytesIO(_head(source)), list[tuple[int, object]](), set[int]()
    tags = ImageFileDirectory_v2(content.read(8) if _head(source, 4) in _TIFF_STARTS[:2] else content.read(16))
    while tags.next and tags.next not in places:
        places.add(tags.next)
        content.seek(tags.next)
        tags.load(content)
        pages.append((tags.get(SUBFILE, 0) if pages else 0, (tags.get(WIDTH), tags.get(HEIGHT))))
    return pages


def turned(values: np.ndarray, orientation: int) -> np.ndarray:
    """Turns and mirrors (bands, height, width) as EXIF's orientation, 1 to 8, says."""
    if orientation in (5, 6, 7, 8):
        values = values.transpose(0, 2, 1)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return values[:, ::rows, ::columns]


def as_picture(pixels: Pixels, bands: Bands | int | Sequence[str] = RGB) -> Image.Image:
    """Shows bands as an RGB image, stretched from black to white; missing data is black.

    Without the names of red, green and blue these are the first three bands, or the first as gray.
    """
    if isinstance(pixels, Image.Image):
        return pixels
    colors = Bands.of(bands).colors
    named = [colors.index(color) for color in range(RGB) if color in colors]
    channels = (pixels[:RGB] if len(pixels) >= RGB else pixels[:1].expand(RGB, -1, -1)).numpy()
    channels = pixels[named].numpy() if len(named) == RGB else channels
    low, high = np.nanpercentile(channels, _STRETCHED_PERCENTILES, axis=(1, 2), keepdims=True)
    levels = np.nan_to_num((channels - low) / np.maximum(high - low, 1e-12))
    return Image.fromarray((levels.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0))


def _head(source: Source, size: int = -1) -> bytes:
    """The first bytes of a file, or all of them."""
    if isinstance(source, str):
        with open(source, "rb") as file:
            return file.read(size)
    place = source.tell()
    try:
        source.seek(0)
        return source.read(size)
    finally:
        source.seek(place)


def _tiff_file(source: Source) -> Any:
    with needs("to read all bands of TIFF files", "tifffile", "tiff"):
        from tifffile import TiffFile
    # It reports tags that it cannot parse, such as GDAL's, for each file
    logging.getLogger("tifffile").setLevel(logging.CRITICAL)
    return TiffFile(source if isinstance(source, str) else io.BytesIO(_head(source)))


def _tiff_values(source: Source) -> tuple[np.ndarray, bool]:
    """The first image of a TIFF file, (bands, height, width), upright."""
    with _tiff_file(source) as file:
        image, tags = file.series[0], file.pages[0].tags
        if len(image.shape) > 3 and "S" in file.pages[0].axes:  # pages of several bands each
            image = file.pages[0]
        axes, shape = image.axes, image.shape
        if len(shape) not in (2, 3) or "Y" not in axes or "X" not in axes:
            raise ValueError(f"it holds {shape} values, and no image of bands")
        pixels, limit = shape[axes.index("Y")] * shape[axes.index("X")], 2 * (Image.MAX_IMAGE_PIXELS or np.inf)
        if pixels > limit:
            raise Image.DecompressionBombError(f"{pixels} pixels")
        values = image.asarray()
        photometric, of_jpeg = tags.valueof(PHOTOMETRIC), tags.valueof(COMPRESSION) in (6, 7)
        extra = len(tags.valueof(EXTRA_SAMPLES, ())) if photometric in (0, 1, 2) else 0
        # The codes of a palette of 8 bits may be meant, and JPEG's YCbCr becomes RGB
        is_read = values.dtype == np.uint8 and (photometric == _PALETTE or (photometric == _YCBCR and of_jpeg))
        if photometric in _INDIRECT_COLORS and not is_read:
            raise ValueError("a palette, CMYK, YCbCr or L*a*b*, as bands or of more than 8 bits; save it as RGB")
        orientation, inverted = tags.valueof(ORIENTATION, 1), photometric == 0
    if values.ndim == 2:
        axes, values = f"S{axes}", values[None]
    # Bands come first or last, depending on the program that wrote the file.
    values = np.moveaxis(values, (axes.index("Y"), axes.index("X")), (1, 2))
    if inverted and values.dtype.kind == "u":  # zero is white
        values = np.iinfo(values.dtype).max - values
    return turned(values, orientation), extra == 1 and len(values) in (2, 4)


def read_pixels(
    path: str, bands: Bands | int | Sequence[str] = RGB, *, file: BinaryIO | None = None, upright: bool = True
) -> Pixels:
    """Reads an image file, or an open file that `path` names in messages, for a network of these bands.

    Three bands are an RGB image if the file has 8 bits. Transparency is dropped without blending, as torchvision's
    ImageFolder does. Files of more bits or with missing data, and other bands, become float32 (bands, height, width),
    with NaN for missing data. A gray file of more bits has its band three times.

    Args:
        path: The file.
        bands: Number of bands that the file must have, if it is not three, or their full names (`data.bands`).
            Bands that a TIFF file describes are picked by name.
        file: The content, instead of the file at `path`.
        upright: Apply the EXIF orientation. DomainBed does not.

    Raises:
        ImageReadError: The file is damaged, has other bands, or no data in more than half of its pixels.
    """
    try:
        if file is None:
            check_regular_file(path)
        if (bands := Bands.of(bands)).is_rgb:
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
    values = values[bands.pick(path, [notes.descriptions.get(band) for band in range(len(values))])]
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
