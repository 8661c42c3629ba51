"""Image files as RGB pictures or as bands. No file starts another program.

Pillow reads photographs of 8 bits: JPEG, PNG, WebP, GIF, BMP and others. GDAL reads the rest, see `rasters`. Color
profiles (ICC) are not applied, as in torchvision's ImageFolder.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from PIL import ExifTags, Image, ImageFile
from torch import Tensor

from ...errors import ImageReadError, MissingDependencyError, check_regular_file, too_many_open_files
from ..bands import RGB, Bands
from .rasters import (
    EIGHT_BIT,
    REPAIR,
    WHOLE,
    Pixels,
    Source,
    check_kind,
    first_bytes,
    is_raster,
    open_raster,
    scaled,
    turned,
    warn_of_bands,
    warn_once,
)

Transform: TypeAlias = Callable[[Pixels], Tensor]
_EXTERNAL = ("EPS",)  # formats whose decoder starts another program (Ghostscript), whatever the file's extension
_WITHOUT_IMAGES = ("MPEG",)  # formats that Pillow identifies and cannot decode
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_WHOLE_MODES = ("L", "LA", "RGB", "RGBA")  # 8-bit modes whose values are those in the file
_STRETCHED_PERCENTILES = (2, 98)
MANY_TIMES = 16  # sides of a network's input, from which details are lost; photographs of telephones have fewer


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
    """Returns the extensions of files that are read, in lower case, such as ".jpg"."""
    readable = {*decoders(), "MPO"}  # files of several JPEG images, which the reader of JPEG opens
    return tuple(sorted(suffix for suffix, name in Image.registered_extensions().items() if name in readable))


def is_eight_bit(image: Image.Image, source: Source) -> bool:
    """Whether RGB of 8 bits holds all bits of an open file."""
    if image.mode not in _MODES:
        return False
    if image.format == "AVIF":  # which Pillow reduces; flags behind this marker tell the depth
        _, marker, flags = first_bytes(source, 1 << 20).partition(b"av1C")
        return not marker or not flags[2] & 0x40
    codec, arguments = next(((tile[0], tile[3]) for tile in getattr(image, "tile", ())), ("", None))
    rawmode, *further = arguments if isinstance(arguments, tuple) else (arguments,)
    if codec == "SGI16" or (codec in ("ppm", "ppm_plain") and further and further[0] > 255):
        return False
    return ";16" not in str(rawmode) or str(rawmode).startswith("BGR")  # "BGR;16" packs a pixel into 16 bits


def read_pixels(
    path: str, bands: Bands | int | Sequence[str] = RGB, *, file: BinaryIO | None = None, upright: bool = True
) -> Pixels:
    """Reads an image file, or an open file that `path` names in messages, for a network of these bands.

    Three bands are an RGB image if the file has 8 bits. Transparency of photographs is dropped without blending, as
    torchvision's ImageFolder does. Files of more bits or with missing data, and other bands, become float32 (bands,
    height, width), with NaN for missing data. A gray file of more bits has its band three times.

    Args:
        path: The file.
        bands: Number of bands that the file must have, if it is not three, or their full names (`data.bands`).
            Bands that a file describes are picked by name.
        file: The content, instead of the file at `path`.
        upright: Apply the EXIF orientation of photographs. DomainBed does not.

    Raises:
        ImageReadError: The file is damaged, has other bands, or no data in more than half of its pixels.
        MissingDependencyError: The file is one for GDAL, and rasterio is not installed.
    """
    bands = Bands.of(bands)
    try:
        if file is None:
            check_regular_file(path)
        if is_raster(file or path):
            with open_raster(path, file=file) as raster:
                return raster.pixels(bands)
        with Image.open(file or path, formats=decoders()) as image:
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                warn_once(path, "holds several images, of which the first is read", image.format)
            has_eight_bits = is_eight_bit(image, file or path)  # known until the image is loaded, as by its tags
            orientation = _orientation(image) if upright else 1
            if has_eight_bits:
                return _eight_bit(path, image, bands, orientation)
            if image.format != "PNG":
                raise ValueError(f"a {image.format} file of more than 8 bits per value; save it as PNG or TIFF")
        with open_raster(path, file=file) as raster:
            raster.orientation = orientation
            return raster.pixels(bands)
    except (ImageReadError, MissingDependencyError):
        raise
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        remedy = "cut it into tiles, or leave the file out"
        raise ImageReadError(f"image={path!r}: is larger than {limit:,} pixels; {remedy}") from error
    except Exception as error:  # decoders raise any class on broken files: KeyError, IndexError, struct.error ...
        if too_many_open_files(error):
            raise
        raise ImageReadError(f"image={path!r}: cannot be decoded ({error}); {REPAIR}") from error


def warn_if_squeezed(path: str, pixels: Pixels, view: Tensor) -> None:
    """Warns once per process of an image that is many times its view (C, height, width), the input of a network."""
    if view.ndim != 3 or not view.numel():  # views of an ensemble are flat
        return
    size = view.shape[1:]
    width, height = pixels.size if isinstance(pixels, Image.Image) else (pixels.shape[2], pixels.shape[1])
    ratio = min(height / size[0], width / size[1])
    if ratio >= MANY_TIMES:
        remark = f"has {width} x {height} pixels, {ratio:.0f} times the input of {size[1]} x {size[0]}"
        warn_once(path, f"{remark}, and is squeezed to it: cut scenes into tiles, or raise --img-size", "squeezed")


class FileFacts(NamedTuple):
    """What the first bytes of an image file say."""

    values: str  # a kind of values, see `rasters`
    band_names: tuple[str, ...] = ()  # the descriptions of bands; "" for none


def file_facts(path: str) -> FileFacts | None:
    """Reads the kind of values and the names of bands of a file; None if it cannot be opened."""
    try:
        check_regular_file(path)
        if is_raster(path):
            with open_raster(path) as raster:
                return FileFacts(raster.value_kind, tuple(text or "" for text in raster.dataset.descriptions))
        with Image.open(path, formats=decoders()) as image:
            return FileFacts(EIGHT_BIT if is_eight_bit(image, path) else WHOLE)
    except Exception:  # the image is refused when it is read
        return None


def exif_place(source: Source) -> tuple[float, float] | None:
    """Returns longitude and latitude in degrees of a photograph's GPS tags; None without them."""
    try:
        with Image.open(source, formats=decoders()) as image:
            tags, degrees = image.getexif().get_ifd(ExifTags.IFD.GPSInfo), list[float]()
        for value, reference in ((4, 3), (2, 1)):
            number = sum(float(part) / 60**power for power, part in enumerate(tags[value]))
            degrees.append(-number if str(tags[reference]).upper().startswith(("W", "S")) else number)
    except Exception:  # absent or damaged tags, of many classes; a damaged image is refused when it is read
        return None
    longitude, latitude = degrees
    return (longitude, latitude) if abs(longitude) <= 180 and abs(latitude) <= 90 else None


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation of a photograph, 1 to 8. Damaged tags are none, as viewers have it."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # of many classes
        return 1


def _eight_bit(path: str, image: Image.Image, bands: Bands, orientation: int) -> Pixels:
    check_kind(EIGHT_BIT, bands, "image", path)
    image.load()
    if not bands.is_rgb:
        if image.mode not in _WHOLE_MODES:
            raise ValueError(f"mode {image.mode!r} holds no bands; save it as TIFF")
        values = turned(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1), orientation)
        return scaled(values[bands.pick(path, [None] * len(values))])
    if len(image.getbands()) > RGB:
        warn_of_bands(path, len(image.getbands()), image.getbands())
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if orientation == 1:
        return rgb
    return Image.fromarray(
        np.ascontiguousarray(turned(np.asarray(rgb).transpose(2, 0, 1), orientation).transpose(1, 2, 0))
    )


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
