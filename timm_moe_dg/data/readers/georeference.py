"""GeoTIFFs by rasterio: opening them, and the places of their pixels in degrees."""

import os
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ...errors import DataError, needs
from ..bands import is_tiff
from .csv_tables import Columns, Table


def import_rasterio() -> ModuleType:
    """Returns rasterio with its submodules; raises `MissingDependencyError` without it."""
    with needs("to read georeferences", "rasterio", "geo"):
        import rasterio
        import rasterio.enums
        import rasterio.features
        import rasterio.vrt
        import rasterio.warp
    return rasterio


def open_raster(path: str, argument: str) -> Any:
    """Opens a GeoTIFF for reading. `argument` names it in a `DataError`."""
    rasterio = import_rasterio()
    if not os.path.isfile(path):
        raise DataError(f"{argument}={path!r}: no such file; give a GeoTIFF")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            # Files of GDAL's other formats, such as VRT, may name further files
            return rasterio.open(path, driver="GTiff")
    except rasterio.errors.RasterioIOError as error:
        raise DataError(f"{argument}={path!r}: cannot be opened as GeoTIFF ({error}); convert it") from error


def check_values(raster: Any, argument: str, *, with_palette: bool) -> None:
    """Refuses a scene by a `DataError` whose values rasterio gives otherwise than `read_pixels`."""
    bits = int(raster.tags(1, ns="IMAGE_STRUCTURE").get("NBITS", 8))
    is_palette = raster.colorinterp[0] == import_rasterio().enums.ColorInterp.palette
    if bits < 8 or "MINISWHITE" in raster.tags(ns="IMAGE_STRUCTURE") or (is_palette and not with_palette):
        kind = "less than 8 bits per value" if bits < 8 else "a palette" if is_palette else "zero as white"
        raise DataError(f"{argument}={raster.name!r}: has {kind}; convert it to gray or RGB of 8 bits")


def is_placed(raster: Any) -> bool:
    """Whether a raster has a coordinate reference system (CRS) of the Earth and a transform to it."""
    is_on_earth = raster.crs is not None and (raster.crs.is_geographic or raster.crs.is_projected)
    return is_on_earth and not raster.transform.is_identity


def places_of(raster: Any, columns: Sequence[float], rows: Sequence[float]) -> np.ndarray:
    """Returns longitude and latitude of points in pixels, float32 (N, 2); NaN outside of the CRS."""
    rasterio = import_rasterio()
    points = rasterio.transform.xy(raster.transform, rows, columns, offset="ul")
    try:
        degrees = rasterio.warp.transform(raster.crs, "EPSG:4326", *points)
    except Exception:  # rasterio's classes are private. One point beside a map of the Earth fails all
        if len(rows) > 1:
            return np.concatenate([places_of(raster, [x], [y]) for x, y in zip(columns, rows, strict=True)])
        degrees = [[np.nan], [np.nan]]
    longitude, latitude = (np.where(np.isfinite(values), values, np.nan) for values in degrees[:2])
    return np.stack([(longitude + 180) % 360 - 180, latitude], axis=1).astype(np.float32)


def with_coordinates(table: os.PathLike[str], fields: Columns, paths: Sequence[str]) -> Columns:
    """Completes the columns lon and lat of a csv table, where both are empty or absent, by the centers of its files."""
    if ("lon" in fields) != ("lat" in fields):
        raise DataError(f"{str(table)!r}: has one of the columns lon and lat; name both in line 1, or none")
    columns = [list(fields.get(name, [""] * len(paths))) for name in ("lon", "lat")]
    for row, path in enumerate(paths):
        if not any(column[row].strip() for column in columns):
            columns[0][row], columns[1][row] = map(str, _center(table, path))
    completed = Table(
        {name: list(column) for name, column in fields.items()} | dict(zip(("lon", "lat"), columns, strict=True))
    )
    if isinstance(fields, Table):
        completed.lines = fields.lines
    return completed


def _center(table: os.PathLike[str], path: str) -> np.ndarray:
    if os.path.isfile(path) and is_tiff(path):
        with open_raster(path, "image") as raster:
            if is_placed(raster):
                return places_of(raster, [raster.width / 2], [raster.height / 2])[0]
    remedy = "write its lon and lat in degrees there, or nan if unknown"
    raise DataError(f"image={path!r}: has no georeference, and no coordinates in {os.path.basename(table)}; {remedy}")


def mask_in(raster: Any, window: Any) -> np.ndarray | None:
    """Returns the pixels of a window that the file's own mask hides, bool (height, width); None without a mask."""
    kinds, flags = raster.mask_flag_enums[0], import_rasterio().enums.MaskFlags
    # Transparency is dropped, as in other images; GDAL also takes a fourth band such as infrared for it
    has_mask = flags.per_dataset in kinds and flags.alpha not in kinds
    return raster.dataset_mask(window=window) == 0 if has_mask else None
