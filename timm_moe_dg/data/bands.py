"""Images of other than three bands, as satellites take them: files read whole, and shown as RGB."""

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import ImageReadError, MissingDependencyError
from . import decoders
from .pixels import RGB

_OF_PILLOW = ("L", "LA", "RGB", "RGBA", "I;16")  # modes whose values are those in the file
_CLIPPED = (2, 98)  # percentiles between which the values of a picture are stretched


def read_bands(path: str, bands: int) -> Tensor:
    """Reads all bands of a TIFF file, or of whatever else Pillow opens without changing values.

    Args:
        path: The file.
        bands: How many it must have.

    Returns:
        float32 (bands, height, width). Whole numbers are divided by the largest of their type, so that 8 and 16 bits
        reach up to 1; floating-point numbers are as they are.

    Raises:
        ImageReadError: It cannot be decoded, has another number of bands, or pixels that are not finite.
        MissingDependencyError: It is a TIFF file, and tifffile is not installed.
    """
    is_tiff = path.lower().endswith((".tif", ".tiff"))
    read = _tiff_reader() if is_tiff else _read_with_pillow
    try:
        decoders.check_regular(path)
        values = read(path)
    except Exception as error:  # decoders raise what they like on broken files
        raise ImageReadError(
            f"image={path!r}: cannot be decoded ({type(error).__name__}: {error}); {decoders.REPAIR}"
        ) from error
    if len(values) != bands:
        remedy = f"leave the file out, or give --in-chans {len(values)} where all files and the model have as many"
        raise ImageReadError(f"image={path!r}: has {len(values)} bands, and {bands} are wanted; {remedy}")
    return _scaled(path, values)


def _tiff_reader() -> Callable[[str], np.ndarray]:
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
        planes = values[None] if values.ndim == 2 else values
        at = axes if values.ndim == 3 else f"S{axes}"
        return np.moveaxis(planes, (at.index("Y"), at.index("X")), (1, 2))  # bands may come first or last

    return read


def _read_with_pillow(path: str) -> np.ndarray:
    with Image.open(path, formats=decoders.present()) as image:
        if image.mode not in _OF_PILLOW:
            raise ValueError(f"mode {image.mode!r} holds no bands; save it as TIFF")
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)


def _scaled(path: str, values: np.ndarray) -> Tensor:
    """Float values of any type of number, see `read_bands`."""
    if np.issubdtype(values.dtype, np.integer):
        return torch.from_numpy(values.astype(np.float32) / np.float32(np.iinfo(values.dtype).max))
    if not np.issubdtype(values.dtype, np.floating):
        raise ImageReadError(f"image={path!r}: has values of the type {values.dtype}; save it as numbers")
    scaled = values.astype(np.float32)
    lacking = (~np.isfinite(scaled)).sum(axis=(1, 2))
    if lacking.any():
        band = int(lacking.argmax())
        said = f"{lacking[band]} pixels of band {band + 1} are no finite numbers (nodata); fill them, or leave it out"
        raise ImageReadError(f"image={path!r}: {said}")
    return torch.from_numpy(scaled)


def as_picture(pixels: Tensor) -> Image.Image:
    """Makes an RGB image of the first three bands, or of gray where there are fewer, each stretched to all levels.

    Args:
        pixels: (bands, height, width).
    """
    shown = pixels[:RGB] if len(pixels) >= RGB else pixels[:1].expand(RGB, -1, -1)
    low, high = np.percentile(shown.numpy(), _CLIPPED, axis=(1, 2), keepdims=True)
    levels = (shown.numpy() - low) / np.maximum(high - low, 1e-12)
    return Image.fromarray((levels.clip(0, 1) * 255).round().astype(np.uint8).transpose(1, 2, 0))


def bands_in(path: str) -> int | None:
    """Counts the bands of a TIFF file that cannot be read as RGB; None where nobody can say."""
    try:
        return len(_tiff_reader()(path))
    except Exception:  # it is a remark in the message of another error
        return None
