"""Image files with any number of bands, types of images on their way to the network, and the formats that are read."""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import ImageReadError, MissingDependencyError, check_regular_file

Pixels: TypeAlias = Image.Image | Tensor  # RGB, or float (bands, height, width)
Transform: TypeAlias = Callable[[Pixels], Tensor]
RGB = 3  # bands

# Formats that Pillow decodes by itself. Its EPS reader starts Ghostscript, whatever the file's extension.
DECODERS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
REPAIR = "repair or remove the file, or give --skip-unreadable"

_PILLOW_MODES = ("L", "LA", "RGB", "RGBA", "I;16")  # modes whose values are those in the file
_STRETCHED_PERCENTILES = (2, 98)


def read_bands(path: str, bands: int) -> Tensor:
    """Reads all bands of a TIFF file, or of another file that Pillow opens without changing its values.

    Returns float32 (bands, height, width). Integers are divided by the largest value of their type, so that 8 and 16
    bits reach up to 1. Floating-point numbers are unchanged. Another number of bands and pixels that are not finite are
    an `ImageReadError`. TIFF files need tifffile.
    """
    is_tiff = path.lower().endswith((".tif", ".tiff"))
    read = _tiff_reader() if is_tiff else _read_with_pillow
    try:
        check_regular_file(path)
        values = read(path)
    except Exception as error:  # decoders raise errors of any class on broken files
        raise ImageReadError(
            f"image={path!r}: cannot be decoded ({type(error).__name__}: {error}); {REPAIR}"
        ) from error
    if len(values) != bands:
        remedy = f"leave the file out, or give --in-chans {len(values)} if all files and the model have as many"
        raise ImageReadError(f"image={path!r}: has {len(values)} bands, expected {bands}; {remedy}")
    return _scaled(path, values)


def count_bands(path: str) -> int | None:
    """Counts the bands of a TIFF file that cannot be read as RGB, or returns None if tifffile cannot read it."""
    try:
        return len(_tiff_reader()(path))
    except Exception:  # the count is only a hint in the message of another error
        return None


def as_picture(pixels: Tensor) -> Image.Image:
    """Shows (bands, H, W) as an RGB image: the first three, or the first as gray, stretched from black to white."""
    channels = (pixels[:RGB] if len(pixels) >= RGB else pixels[:1].expand(RGB, -1, -1)).numpy()
    low, high = np.percentile(channels, _STRETCHED_PERCENTILES, axis=(1, 2), keepdims=True)
    levels = (channels - low) / np.maximum(high - low, 1e-12)
    return Image.fromarray((levels.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0))


@cache
def installed_decoders() -> tuple[str, ...]:
    """Returns those of `DECODERS` that this Pillow was built with."""
    Image.init()
    return tuple(name for name in DECODERS if name in Image.OPEN)


def _tiff_reader() -> Callable[[str], np.ndarray]:
    """A function of a path that returns (bands, height, width) values."""
    try:
        from tifffile import TiffFile
    except ImportError as error:
        raise MissingDependencyError.of("to read all bands of TIFF files", "tifffile", "tiff") from error

    def read(path: str) -> np.ndarray:
        with TiffFile(path) as file:
            series = file.series[0]
            axes, values = series.axes, series.asarray()
        if values.ndim not in (2, 3) or "Y" not in axes or "X" not in axes:
            raise ValueError(f"it holds {values.shape} values, and no image of bands")
        if values.ndim == 2:
            axes, values = f"S{axes}", values[None]
        # Bands come first or last, depending on the program that wrote the file.
        return np.moveaxis(values, (axes.index("Y"), axes.index("X")), (1, 2))

    return read


def _read_with_pillow(path: str) -> np.ndarray:
    with Image.open(path, formats=installed_decoders()) as image:
        if image.mode not in _PILLOW_MODES:
            raise ValueError(f"mode {image.mode!r} holds no bands; save it as TIFF")
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def _scaled(path: str, values: np.ndarray) -> Tensor:
    if np.issubdtype(values.dtype, np.integer):
        return torch.from_numpy(values.astype(np.float32) / np.float32(np.iinfo(values.dtype).max))
    if not np.issubdtype(values.dtype, np.floating):
        raise ImageReadError(f"image={path!r}: has values of the type {values.dtype}; save it as numbers")
    scaled = values.astype(np.float32)
    nodata = (~np.isfinite(scaled)).sum(axis=(1, 2))
    if nodata.any():
        band = int(nodata.argmax())
        raise ImageReadError(
            f"image={path!r}: {nodata[band]} pixels of band {band + 1} are no finite numbers (nodata); "
            "fill them, or leave the file out"
        )
    return torch.from_numpy(scaled)
