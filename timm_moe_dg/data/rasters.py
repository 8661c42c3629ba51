"""GeoTIFFs by rasterio: their pixels' places in degrees, and tiles of one label each cut from them.

A folder of tiles is one that `read_place_folder` reads.
"""

import json
import logging
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ..errors import ArgumentError, DataError, needs
from .readers.images import MOST_MISSING, missing_values

Tile: TypeAlias = tuple[int, int]  # row and column in the grid of tiles
SPLITS = ("id_val", "id_test")  # each has a fifth of the blocks, and train the rest
HEADER = ("path", "label", "lon", "lat", "split", "group")
Row: TypeAlias = tuple[str, ...]  # fields of `HEADER`
_LOGGER = logging.getLogger(__name__)


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


def mask_in(raster: Any, window: Any) -> np.ndarray | None:
    """Returns the pixels of a window that the file's own mask hides, bool (height, width); None without a mask."""
    kinds, flags = raster.mask_flag_enums[0], import_rasterio().enums.MaskFlags
    # Transparency is dropped, as in other images; GDAL also takes a fourth band such as infrared for it
    has_mask = flags.per_dataset in kinds and flags.alpha not in kinds
    return raster.dataset_mask(window=window) == 0 if has_mask else None


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """How a scene is cut."""

    size: int = 224  # side of a tile in pixels
    column: str = "label"  # property of GeoJSON features that holds their labels
    cover: float = 0.5  # least share of a tile that its label covers
    block: int = 8  # side of a block in tiles; a block is in one split
    seed: int = 0  # of the split
    split: str | None = None  # of all tiles; None to split by blocks


def cut_tiles(scene: str, labels: str, folder: Path, options: TileOptions) -> tuple[list[Row], Mapping[str, int]]:
    """Writes tiles into a folder. Returns their rows, and the numbers of tiles by label and of those left out.

    A tile has the label that covers most of it. Tiles without data in more than half of their pixels are left out.
    Labels are GeoJSON polygons or a GeoTIFF of classes, in any coordinate reference system.
    """
    with open_raster(scene, "scene") as raster:
        if not is_placed(raster):
            raise DataError(f"scene={scene!r}: has no coordinate reference system (CRS); give a georeferenced scene")
        check_values(raster, "scene", with_palette=True)
        if options.size > min(raster.shape):
            size = f"is larger than the scene, {raster.width} x {raster.height} pixels"
            raise ArgumentError.of("size", options.size, f"{size}; give a smaller one")
        is_json = Path(labels).suffix.lower() in (".geojson", ".json")
        source = _read_geojson(labels, options, raster) if is_json else _Raster(labels, raster)
        tiles, left_out = _write_tiles(raster, source, folder, options)
    # Pixels whose center lies on a border of neighbors are in both
    if isinstance(source, _Polygons) and source.overlap > source.labeled / 100:
        text = "labels=%r: %d pixels lie in polygons of several labels, of which the last in the file counts"
        _LOGGER.warning(text, labels, source.overlap)
    if not tiles:
        remedy = f"cover {options.cover:g} of no tile of {scene!r}; check their place and labels, or lower --cover"
        raise DataError(f"labels={labels!r}: {remedy}")
    splits = split_by_blocks([tile for tile, _, _ in tiles], options)
    group, names = Path(scene).stem, [label for _, label, _ in tiles]
    rows = [
        (f"{group}/{_name(tile)}", label, *(f"{degrees:.5f}" for degrees in place), splits[tile], group)
        for tile, label, place in tiles
    ]
    return rows, {name: names.count(name) for name in sorted(set(names))} | left_out


def split_by_blocks(tiles: Sequence[Tile], options: TileOptions) -> dict[Tile, str]:
    """Returns each tile's split. Neighbors look alike, so that whole blocks are drawn."""
    if options.split:
        return dict.fromkeys(tiles, options.split)
    blocks = {tile: (tile[0] // options.block, tile[1] // options.block) for tile in tiles}
    drawn = sorted(set(blocks.values()))
    if len(drawn) < len(SPLITS) + 1:
        remedy = f"the labeled tiles are in {len(drawn)} blocks, and three splits need three; give fewer tiles a side"
        raise ArgumentError.of("block", options.block, remedy)
    random.Random(options.seed).shuffle(drawn)
    few = max(1, len(drawn) // 5)
    names = {block: SPLITS[place // few] for place, block in enumerate(drawn[: few * len(SPLITS)])}
    return {tile: names.get(block, "train") for tile, block in blocks.items()}


def _write_tiles(
    raster: Any, source: "_Polygons | _Raster", folder: Path, options: TileOptions
) -> tuple[list[tuple[Tile, str, np.ndarray]], dict[str, int]]:
    """Writes the tiles that have a label, a row of the scene at a time."""
    size, tiles = options.size, []
    left_out = {"without a label": 0, "without data": 0}
    for row in range(raster.height // size):
        codes = source.codes(_window(0, row * size, raster.width, size), raster)
        columns = range(raster.width // size)
        places = places_of(raster, [(column + 0.5) * size for column in columns], [(row + 0.5) * size] * len(columns))
        for column in columns:
            label = _most_frequent(codes[:, column * size : (column + 1) * size], options.cover)
            if label is None:
                left_out["without a label"] += 1
                continue
            window = _window(column * size, row * size, size, size)
            values = raster.read(window=window)
            mask = mask_in(raster, window)
            missing = missing_values(values, raster.nodata, _transparent(raster, values) if mask is None else mask)
            if missing is not None and missing.mean(axis=(1, 2)).max() > MOST_MISSING:
                left_out["without data"] += 1
                continue
            _write_tile(folder / _name((row, column)), raster, values, window, mask)
            tiles.append(((row, column), source.names[label], places[column]))
    return tiles, left_out


def _transparent(raster: Any, values: np.ndarray) -> np.ndarray | None:
    """Marks gray pixels of no opacity, as beside the footprint of a mosaic.

    Colored ones have data, because GDAL also takes a fourth band such as infrared for transparency. The result is None
    without such a band.
    """
    if raster.colorinterp[-1] != import_rasterio().enums.ColorInterp.alpha:
        return None
    return (values[-1] == 0) & (values[:-1] == values[0]).all(axis=0)


def _write_tile(path: Path, raster: Any, values: np.ndarray, window: Any, mask: np.ndarray | None) -> None:
    rasterio = import_rasterio()
    profile = {"driver": "GTiff", "dtype": values.dtype, "nodata": raster.nodata, "crs": raster.crs}
    profile |= {"count": len(values), "height": values.shape[1], "width": values.shape[2], "compress": "deflate"}
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True),
        rasterio.open(path, "w", transform=raster.window_transform(window), **profile) as tile,
    ):
        tile.colorinterp = raster.colorinterp  # GDAL's default for a fourth band is transparency
        if tile.colorinterp[0] == rasterio.enums.ColorInterp.palette:
            tile.write_colormap(1, raster.colormap(1))
        tile.write(values)
        tile.descriptions, tile.scales, tile.offsets = raster.descriptions, raster.scales, raster.offsets
        if mask is not None:
            tile.write_mask(~mask)


class _Polygons:
    """Labels of GeoJSON features, in the scene's coordinates. Of polygons that overlap, the last one counts."""

    def __init__(self, shapes: Sequence[tuple[Any, str]]) -> None:
        self.labeled, self.overlap = 0, 0  # pixels of the scene in polygons, and in those of several labels
        self.names = dict(enumerate(sorted({name for _, name in shapes}), 1))
        codes = {name: code for code, name in self.names.items()}
        self.shapes = [(shape, codes[name]) for shape, name in shapes]

    def codes(self, window: Any, raster: Any) -> np.ndarray:
        """Returns the code of each pixel of a window, int32 (height, width); 0 for none."""
        grid = {"out_shape": (int(window.height), int(window.width)), "transform": raster.window_transform(window)}
        orders = (self.shapes, self.shapes[::-1])
        codes, others = (import_rasterio().features.rasterize(shapes, **grid, dtype="int32") for shapes in orders)
        self.labeled += int((codes != 0).sum())
        self.overlap += int((codes != others).sum())
        return codes


class _Raster:
    """Labels of a GeoTIFF, whose values are the names of classes."""

    def __init__(self, path: str, raster: Any) -> None:
        labels = open_raster(path, "labels")
        if not is_placed(labels) or labels.count != 1 or np.dtype(labels.dtypes[0]).kind not in "iu":
            remedy = "needs one band of whole numbers and a coordinate reference system (CRS); convert it"
            raise DataError(f"labels={path!r}: {remedy}")
        grid = {"crs": raster.crs, "transform": raster.transform, "height": raster.height, "width": raster.width}
        # Outside of the labels, a nodata value or else transparency marks pixels without one
        self.vrt = import_rasterio().vrt.WarpedVRT(labels, **grid, add_alpha=labels.nodata is None)
        self.names: dict[int, str] = {}

    def codes(self, window: Any, raster: Any) -> np.ndarray:
        """Returns the code of each pixel of a window, int64 (height, width); 0 for none."""
        values, valid = self.vrt.read(1, window=window).astype(np.int64), self.vrt.dataset_mask(window=window) > 0
        self.names |= {value + (value >= 0): str(value) for value in np.unique(values[valid]).tolist()}
        return np.where(valid, values + (values >= 0), 0)  # a label of 0 is code 1, and -1 stays


def _read_geojson(path: str, options: TileOptions, raster: Any) -> _Polygons:
    rasterio = import_rasterio()
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        features = table["features"]
        # RFC 7946 has degrees alone, and GDAL names others
        crs = rasterio.crs.CRS.from_user_input(table.get("crs", {}).get("properties", {}).get("name", "EPSG:4326"))
        given = [(feature["geometry"], (feature.get("properties") or {}).get(options.column)) for feature in features]
        labeled = [(_polygons(shape), str(label)) for shape, label in given if label is not None]
        shapes = [(shape, label) for polygons, label in labeled for shape in polygons]
        if crs != raster.crs:
            step = 0.03 if crs.is_geographic else 3_000.0  # degrees or meters: chords are 0.1 m from a curved edge
            shapes = [
                (rasterio.warp.transform_geom(crs, raster.crs, _with_points(shape, step)), label)
                for shape, label in shapes
            ]
    except Exception as error:  # of many classes; those of GDAL are private
        raise DataError(f"labels={path!r}: cannot be read as GeoJSON ({error}); convert them by GDAL") from error
    if not shapes:
        names = ", ".join(sorted({name for feature in features for name in feature.get("properties") or {}})) or "none"
        raise ArgumentError.of("column", options.column, f"no polygon of {path!r} has it; its properties are {names}")
    if lines := sum(not polygons for polygons, _ in labeled):
        _LOGGER.warning("labels=%r: %d labeled features without a polygon are left out", path, lines)
    return _Polygons(shapes)


def _polygons(shape: Any) -> list[Any]:
    """Returns the polygons of a GeoJSON geometry. GDAL repairs polygons as collections of them and of lines."""
    if shape is None:  # a feature without a place
        return []
    if shape["type"] == "GeometryCollection":
        return [polygon for part in shape["geometries"] for polygon in _polygons(part)]
    return [shape] if shape["type"] in ("Polygon", "MultiPolygon") else []


def _with_points(shape: Any, step: float) -> Any:
    """Puts points on the edges of polygons. An edge is straight in its own system, and may be curved in another."""
    parts = shape["coordinates"] if shape["type"] == "MultiPolygon" else [shape["coordinates"]]
    return {"type": "MultiPolygon", "coordinates": [[_ring(ring, step) for ring in rings] for rings in parts]}


def _ring(ring: Sequence[Sequence[float]], step: float) -> list[list[float]]:
    corners = np.array([corner[:2] for corner in ring], float)
    edges = np.diff(corners, axis=0)
    counts = np.ceil(np.abs(edges).max(axis=1) / step).clip(1).astype(int)
    edge = np.repeat(np.arange(len(edges)), counts)
    place = np.arange(len(edge)) - (np.cumsum(counts) - counts)[edge]  # of a point on its edge
    points = corners[edge] + edges[edge] * (place / counts[edge])[:, None]
    return [*points.tolist(), corners[-1].tolist()]


def _most_frequent(codes: np.ndarray, cover: float) -> int | None:
    """The code of most pixels; None if these are less than a share `cover`, or have no label."""
    values, counts = np.unique(codes[codes != 0], return_counts=True)
    if not len(values) or counts.max() < cover * codes.size:
        return None
    return int(values[counts.argmax()])


def _window(column: int, row: int, width: int, height: int) -> Any:
    return import_rasterio().windows.Window(column, row, width, height)


def _name(tile: Tile) -> str:
    return f"{tile[0]:04}_{tile[1]:04}.tif"
