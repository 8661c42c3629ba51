"""Raster files by GDAL, through rasterio: every TIFF and JPEG 2000, and PNG of more than 8 bits.

An image, a tile and a window of a scene are windows of a `Raster`, so that all have the same values and missing pixels.
Whole numbers are divided by the largest value of their type, so that 8, 16 and 32 bits reach up to 1. Values of a file
that states a scale or an offset become physical ones, such as reflectances. Floating-point numbers are unchanged.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, BinaryIO, TypeAlias
from warnings import filterwarnings

import numpy as np
import torch
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor

from ...errors import DataError, ImageReadError, check_regular_file, needs, too_many_open_files
from ..bands import RGB, Bands, describes_rgb

Source: TypeAlias = str | BinaryIO
Pixels: TypeAlias = Image.Image | Tensor  # RGB, or float (bands, height, width)
REPAIR = "repair or remove the file, or give --skip-unreadable"
MOST_MISSING = 0.5  # share of a band's pixels
# Kinds of values: of 8 bits, whole numbers, floating-point numbers, and numbers with a scale or an offset
EIGHT_BIT, WHOLE, REAL, STATED = "8 bits", "whole", "real", "stated"
_LARGEST_VALUE = 1e30  # beyond are only markers of missing data, such as -3.4e38
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# The first bytes of files, and GDAL's drivers for them. Its other formats, such as VRT, may name further files
_DRIVERS = {
    **dict.fromkeys(_TIFF_STARTS, "GTiff"),
    **{b"\0\0\0\x0c": "JP2OpenJPEG", b"\xff\x4f\xff\x51": "JP2OpenJPEG"},
}
_PNG = {b"\x89PNG": "PNG"}  # which Pillow reads if it has 8 bits
_MOST_PAGES = 1000  # of a TIFF file, whose tags are read
# TIFF tags, and values of them
SUBFILE, OLD_SUBFILE, PHOTOMETRIC, ORIENTATION = 254, 255, 262, 274
_REDUCED_OR_MASK, _OLD_REDUCED = 1 | 4, 2  # an overview, a thumbnail or a mask
_WHITE_IS_ZERO, _PALETTE = 0, 3
_NO_RGB = {**dict.fromkeys((8, 9, 10), "L*a*b*"), **dict.fromkeys((32803, 34892), "raw values of a camera")}
_LOGGER = logging.getLogger(__name__)
_warned: set[object] = set()


@cache
def import_rasterio() -> ModuleType:
    """Returns rasterio with its submodules; raises `MissingDependencyError` without it."""
    with needs("to read TIFF and JPEG 2000 files, and images of more than 8 bits,", "rasterio", "geo"):
        import rasterio
        import rasterio.enums
        import rasterio.features
        import rasterio.vrt
        import rasterio.warp
    filterwarnings("ignore", category=rasterio.errors.NotGeoreferencedWarning)  # images need no place
    return rasterio


def is_raster(source: Source) -> bool:
    """Whether a file is TIFF, BigTIFF or JPEG 2000, by its first bytes."""
    return first_bytes(source, 4) in _DRIVERS


def first_bytes(source: Source, size: int) -> bytes:
    """Returns the first bytes of a file, or of an open one."""
    with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
        file.seek(0)
        return file.read(size)


@contextmanager
def open_raster(path: str, argument: str = "image", file: BinaryIO | None = None) -> Iterator["Raster"]:
    """Opens the first full image of a file, or of an open `file` that `path` names in messages.

    Raises:
        ImageReadError: The file is missing, damaged or of another kind. `argument` names it.
    """
    rasterio = import_rasterio()
    with ExitStack() as stack:
        try:
            if file is None:
                check_regular_file(path)
            content = file or stack.enter_context(open(path, "rb"))
            driver = (_DRIVERS | _PNG).get(first_bytes(content, 4))
            if driver is None:
                raise ValueError("it is no TIFF or JPEG 2000 file")
            pages = _full_pages(content)
            page, tags = pages[0]
            name = os.path.abspath(path)
            if file is not None or os.fsencode(name) != name.encode(errors="replace"):  # GDAL takes UTF-8 alone
                content.seek(0)
                name = stack.enter_context(rasterio.MemoryFile(content.read())).name
            name = f"GTIFF_DIR:{page + 1}:{name}" if page else name
            dataset = stack.enter_context(rasterio.open(name, driver=driver))
            raster = Raster(dataset, path, argument, tags)
        except Exception as error:  # Pillow's reader of tags raises any class
            if too_many_open_files(error):
                raise
            reason = getattr(error, "strerror", None) or error
            remedy = "copy it again if it was cut short, or convert it"
            raise ImageReadError(f"{argument}={path!r}: cannot be decoded ({reason}); {remedy}") from error
        if len(pages) > 1:
            warn_once(path, "holds several images, of which the first is read", "TIFF")
        yield raster


@contextmanager
def reading(path: str, argument: str) -> Iterator[None]:
    """Turns a failed reading of values into an `ImageReadError` that names the file."""
    try:
        yield
    except import_rasterio().errors.RasterioIOError as error:
        reason = f"is cut short or damaged ({error.__cause__ or error})"
        raise ImageReadError(f"{argument}={path!r}: {reason}; {REPAIR}") from error


def _full_pages(file: BinaryIO) -> list[tuple[int, dict[int, Any]]]:
    """Position and tags of each page of a TIFF file that is no thumbnail, overview or mask; no tags of other files."""
    header = first_bytes(file, 16)
    if header[:4] not in _TIFF_STARTS:
        return [(0, {})]
    tags = ImageFileDirectory_v2(header if header[2:4] in (b"+\0", b"\0+") else header[:8])
    pages, places = list[tuple[int, dict[int, Any]]](), set[int]()
    while tags.next and tags.next not in places and len(places) < _MOST_PAGES:
        page = len(places)
        places.add(tags.next)
        file.seek(tags.next)
        tags.load(file)
        is_reduced = (tags.get(SUBFILE) or 0) & _REDUCED_OR_MASK or tags.get(OLD_SUBFILE) == _OLD_REDUCED
        if not is_reduced:
            pages.append((page, {tag: tags.get(tag) for tag in (PHOTOMETRIC, ORIENTATION)}))
    if places and not pages:
        raise ValueError("all its images are reduced ones, as in raw files of cameras")
    return pages or [(0, {})]


class Raster:
    """An open raster file."""

    def __init__(self, dataset: Any, path: str, argument: str, tags: dict[int, Any]) -> None:
        self.dataset, self.path, self.argument = dataset, path, argument
        self.orientation = tags.get(ORIENTATION) or 1
        self._photometric = tags.get(PHOTOMETRIC)
        stored = np.dtype(dataset.dtypes[0]).itemsize * 8
        self._bits = int(dataset.tags(1, ns="IMAGE_STRUCTURE").get("NBITS", stored))
        interpretations = import_rasterio().enums.ColorInterp
        is_palette = dataset.colorinterp[0] == interpretations.palette  # for GDAL also of 1 bit and MINISWHITE
        self._is_palette = is_palette and self._photometric in (None, _PALETTE)
        # GDAL marks a fourth band as transparency by default. A band with a description, such as infrared, is data
        is_alpha = dataset.colorinterp[-1] == interpretations.alpha and not dataset.descriptions[-1]
        self.alpha = dataset.count - 1 if is_alpha else None
        self.states_scale = any(scale != 1 for scale in dataset.scales) or any(dataset.offsets)
        self._check_colors()

    def _check_colors(self) -> None:
        dtype, space = self.dataset.dtypes[0], _NO_RGB.get(self._photometric or 0, "")
        if self._is_palette and dtype != "uint8":
            space = "a palette of more than 8 bits"
        if self._space == "CMYK" and dtype != "uint8":
            space = "CMYK of more than 8 bits"
        if np.dtype(dtype).kind not in "iuf":
            space = f"values of the type {dtype}"
        if space:
            raise ValueError(f"it holds {space}; save it as RGB")

    @property
    def _space(self) -> str | None:
        return self.dataset.tags(ns="IMAGE_STRUCTURE").get("SOURCE_COLOR_SPACE")

    @property
    def value_kind(self) -> str:
        """What the values are: `EIGHT_BIT`, `WHOLE`, `REAL` or `STATED`."""
        dtype = np.dtype(self.dataset.dtypes[0])
        if self.states_scale:
            return STATED
        return REAL if dtype.kind == "f" else EIGHT_BIT if dtype == np.uint8 else WHOLE

    @property
    def has_mask(self) -> bool:
        """Whether the file has a mask of its pixels, or one beside it."""
        flags, kinds = import_rasterio().enums.MaskFlags, self.dataset.mask_flag_enums[0]
        return flags.per_dataset in kinds and flags.alpha not in kinds

    @property
    def opaque(self) -> range:
        """The positions of all bands but transparency."""
        return range(self.dataset.count - (self.alpha is not None))

    def positions(self, bands: Bands) -> list[int]:
        """Returns the positions of bands in the file: for RGB the first three, or a single one.

        Raises:
            ImageReadError: The file has other bands.
        """
        count = len(self.opaque)
        check_kind(self.value_kind, bands, self.argument, self.path)
        if bands.is_rgb:
            colors = [color.name for color in self.dataset.colorinterp[:RGB]]
            if count not in (1, RGB) and not (count == RGB + 1 and colors == ["red", "green", "blue"]):
                remedy = f"has {count} bands: give --in-chans {count}, or save three of them as RGB"
                raise ImageReadError(f"{self.argument}={self.path!r}: {remedy}")
            if self.dataset.count == RGB + 1:
                warn_of_bands(self.path, self.dataset.count)
            count = min(count, RGB)
            names = [text or color for text, color in zip(self.dataset.descriptions, colors, strict=False)]
            if count == RGB and not describes_rgb(names):
                remark = f"describes its bands as {', '.join(names)}, read as RGB; name them with --bands"
                warn_once(self.path, remark, str(names))
            return list(range(count))
        if self._space == "CMYK":
            raise ImageReadError(f"{self.argument}={self.path!r}: holds CMYK and no bands; save it as RGB")
        is_whole = bands.count == self.dataset.count  # transparency is one of the bands
        return bands.pick(self.path, self.dataset.descriptions[: None if is_whole else count])

    def read(self, positions: Sequence[int], window: Any = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads the values of bands as they are stored, (bands, height, width), and marks those without data.

        These are nodata values, numbers that are not finite, and pixels that a mask or transparency hides. Nodata and
        masks may be in files beside the image (.aux.xml, .msk). None if there are none.
        """
        with reading(self.path, self.argument):
            values = self.dataset.read([position + 1 for position in positions], window=window)
            missing = np.zeros(values.shape, bool)
            if self.has_mask:
                missing |= self.dataset.read_masks(1, window=window) == 0
            # Photographs lose their transparency, and so do PNG files of more than 8 bits
            if self.alpha is not None and self.alpha not in positions and self.dataset.driver != "PNG":
                missing |= self.dataset.read(self.alpha + 1, window=window) == 0
        for band, position in enumerate(positions):
            nodata = self.dataset.nodatavals[position]
            if nodata is not None and np.isfinite(nodata):
                # The tag is decimal text, and rounds to the type of the values
                number = np.float64(nodata) if values.dtype.kind in "iu" else np.array(nodata).astype(values.dtype)
                missing[band] |= values[band] == number
        if values.dtype.kind == "f":
            missing |= ~(np.abs(values) <= min(_LARGEST_VALUE, float(np.finfo(values.dtype).max)))
        return values, missing if missing.any() else None

    def converted(
        self, values: np.ndarray, missing: np.ndarray | None, bands: Bands, positions: Sequence[int]
    ) -> Pixels:
        """Turns values of `read` into an RGB image of 8 bits, or float32 (bands, height, width) with NaN if missing."""
        if bands.is_rgb and self._is_palette:
            palette = self.dataset.colormap(1)
            table = np.array([palette.get(code, (0, 0, 0))[:RGB] for code in range(256)], np.uint8)
            values = table[values[0]].transpose(2, 0, 1)
        elif self._photometric == _WHITE_IS_ZERO and values.dtype.kind == "u":
            gray = [row for row, position in enumerate(positions) if position != self.alpha]
            values[gray] = 2**self._bits - 1 - values[gray]
        if self._bits < 8 and not self._is_palette:
            values = (values.astype(np.uint16) * 255 // (2**self._bits - 1)).astype(np.uint8)
        is_code = bands.is_rgb and self._is_palette  # of a color, and no value
        is_stated = self.states_scale and bands.physical is not False and not is_code
        if bands.is_rgb and values.dtype == np.uint8 and missing is None and not is_stated:
            colors = np.repeat(values, RGB // len(values), axis=0)
            return Image.fromarray(np.ascontiguousarray(colors.transpose(1, 2, 0)))
        factors = [np.array(given)[list(positions)] for given in (self.dataset.scales, self.dataset.offsets)]
        numbers = scaled(values, missing, factors if is_stated else None)
        if not bands.is_rgb:
            return numbers
        if values.dtype != np.uint8:
            warn_once(self.path, f"holds {values.dtype} values, which are read in full depth", values.dtype)
        return numbers.repeat(RGB // len(numbers), 1, 1)

    def copy(self, window: Any) -> bytes:
        """Returns a window as a GeoTIFF with the values, names, colors, scales and mask that the file has there."""
        rasterio, source = import_rasterio(), self.dataset
        profile = {"driver": "GTiff", "dtype": source.dtypes[0], "nodata": source.nodata, "crs": source.crs}
        profile |= {"count": source.count, "height": window.height, "width": window.width, "compress": "deflate"}
        if self._bits < 8:
            profile["nbits"] = self._bits
        is_white = self._photometric == _WHITE_IS_ZERO
        if is_white:
            profile["photometric"] = "miniswhite"
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.MemoryFile() as memory:
            with memory.open(transform=source.window_transform(window), **profile) as tile:
                if not is_white:
                    tile.colorinterp = source.colorinterp  # GDAL's default for a fourth band is transparency
                if self._is_palette and not is_white:
                    tile.write_colormap(1, source.colormap(1))
                tile.write(source.read(window=window))
                tile.descriptions, tile.scales, tile.offsets = source.descriptions, source.scales, source.offsets
                if self.has_mask:
                    tile.write_mask(source.read_masks(1, window=window))
            return memory.read()

    def pixels(self, bands: Bands) -> Pixels:
        """Reads the whole image, upright.

        Raises:
            ImageReadError: A band is without data in more than half of its pixels, or the image is very large.
        """
        limit = 2 * (Image.MAX_IMAGE_PIXELS or np.inf)
        if self.dataset.width * self.dataset.height > limit:
            raise Image.DecompressionBombError("too many pixels")
        positions = self.positions(bands)
        values, missing = self.read(positions)
        if (share := missing_share(missing)) > MOST_MISSING:
            band = int(missing.mean(axis=(1, 2)).argmax())  # type: ignore[union-attr]
            text = f"{share:.0%} of band {band + 1} are without data (nodata); {REPAIR}"
            raise ImageReadError(f"{self.argument}={self.path!r}: {text}")
        if missing is not None:
            missing = turned(missing, self.orientation)
        return self.converted(turned(values, self.orientation), missing, bands, positions)


def missing_share(missing: np.ndarray | None) -> float:
    """Returns the largest share of missing pixels of a band."""
    return 0.0 if missing is None else float(missing.mean(axis=(1, 2)).max())


def scaled(
    values: np.ndarray, missing: np.ndarray | None = None, factors: Sequence[np.ndarray] | None = None
) -> Tensor:
    """Scales (bands, height, width) to float32, with NaN at `missing` values, which transforms turn into the mean.

    `factors` are a scale and an offset for each band. Without them whole numbers are divided by their type's maximum.
    """
    # Of floating-point numbers, those without data may be too large for float32
    present = values if missing is None or values.dtype.kind != "f" else np.where(missing, values.dtype.type(0), values)
    if factors is not None:
        scale, offset = (numbers[:, None, None] for numbers in factors)
        numbers = (present * scale + offset).astype(np.float32)
    else:
        numbers = present.astype(np.float32)
        numbers /= np.float32(np.iinfo(values.dtype).max if values.dtype.kind in "iu" else 1)
    if missing is not None:
        numbers[np.broadcast_to(missing, numbers.shape)] = np.nan
    return torch.from_numpy(numbers)


def turned(values: np.ndarray, orientation: int) -> np.ndarray:
    """Turns and mirrors (bands, height, width) as EXIF's orientation, 1 to 8, says."""
    if orientation in (5, 6, 7, 8):
        values = values.transpose(0, 2, 1)
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return values[:, ::rows, ::columns]


def check_kind(kind: str, bands: Bands, argument: str, path: str) -> None:
    """Refuses whole numbers without a scale if the training images were physical, and warns of the opposite."""
    if bands.physical and kind in (EIGHT_BIT, WHOLE):
        text = "holds whole numbers without a scale, and the training images were physical values"
        remedy = "state it by gdal_edit -a_scale and -a_offset, or convert it to real numbers"
        raise ImageReadError(f"{argument}={path!r}: {text}; {remedy}")
    if bands.physical is False and kind == STATED:
        warn_once(path, "states a scale, which the training images did not: its stored values are read", STATED)
    if bands.physical is False and kind == REAL:
        warn_once(path, "holds real numbers, and the training images were whole numbers without a scale", REAL)


def warn_of_bands(path: str, count: int, names: tuple[str, ...] = ()) -> None:
    """Warns of a file of four bands, of which RGB has three."""
    listed = f" ({', '.join(names)})" if names else ""
    warn_once(path, f"has {count} bands{listed}, read as three (RGB), without --in-chans", (count, names))


def warn_once(path: str, remark: str, kind: object) -> None:
    """Warns once per process and kind."""
    if kind not in _warned:
        _warned.add(kind)
        _LOGGER.warning("image=%r: %s; others like it are not mentioned", path, remark)


def is_placed(dataset: Any) -> bool:
    """Whether a rasterio dataset has a coordinate reference system (CRS) of the Earth and a transform to it."""
    is_on_earth = dataset.crs is not None and (dataset.crs.is_geographic or dataset.crs.is_projected)
    return is_on_earth and not dataset.transform.is_identity


def check_scene(raster: Raster, *, needs_place: bool = True) -> None:
    """Refuses a scene that is stored turned, or has no place on the Earth, by a `DataError`."""
    remedy = ""
    if raster.orientation != 1:
        remedy = f"has the orientation {raster.orientation}, which georeferences do not follow; save it upright"
    elif len({str(nodata) for nodata in raster.dataset.nodatavals}) > 1:
        remedy = "has different nodata values in its bands, which a tile cannot hold; give all bands one"
    elif needs_place and not is_placed(raster.dataset):
        remedy = "has no coordinate reference system (CRS); georeference it"
        if raster.dataset.gcps[0]:
            remedy = "has ground control points and no grid; warp it by gdalwarp"
    if remedy:
        raise DataError(f"{raster.argument}={raster.path!r}: {remedy}")


def places_of(dataset: Any, columns: Sequence[float], rows: Sequence[float]) -> np.ndarray:
    """Returns longitude and latitude of points in pixels, float32 (N, 2); NaN outside of the CRS."""
    rasterio = import_rasterio()
    points = rasterio.transform.xy(dataset.transform, rows, columns, offset="ul")
    try:
        degrees = rasterio.warp.transform(dataset.crs, "EPSG:4326", *points)
    except Exception:  # rasterio's classes are private. One point beside a map of the Earth fails all
        if len(rows) > 1:
            return np.concatenate([places_of(dataset, [x], [y]) for x, y in zip(columns, rows, strict=True)])
        degrees = [[np.nan], [np.nan]]
    longitude, latitude = (np.where(np.isfinite(values), values, np.nan) for values in degrees[:2])
    return np.stack([(longitude + 180) % 360 - 180, latitude], axis=1).astype(np.float32)
