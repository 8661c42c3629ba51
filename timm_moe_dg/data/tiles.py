"""Tiles of one label each, cut from a georeferenced scene.

A folder of tiles is one that `read_place_folder` reads.
"""

import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import ArgumentError, DataError
from .domains import normalized
from .readers.csv_tables import MISSING
from .readers.rasters import (
    MOST_MISSING,
    Raster,
    check_scene,
    import_rasterio,
    is_placed,
    missing_share,
    open_raster,
    places_of,
    reading,
)

Tile: TypeAlias = tuple[int, int]  # row and column in the grid of tiles
SPLITS = ("id_val", "id_test")  # each has a fifth of the blocks, and train the rest
HEADER = ("path", "label", "lon", "lat", "split", "group")
Row: TypeAlias = tuple[str, ...]  # fields of `HEADER`
TILE = re.compile(r"\d{4,}_\d{4,}\.tif")  # the file of row and column
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TileOptions:
    """How a scene is cut."""

    size: int  # side of a tile in pixels
    column: str  # property of GeoJSON features that holds their labels
    cover: float  # least share of a tile that its label covers
    block: int  # side of a block in tiles; a block is in one split
    seed: int  # of the split
    split: str | None  # of all tiles; None to split by blocks


def cut_tiles(scene: str, labels: str, folder: Path, options: TileOptions) -> tuple[list[Row], Mapping[str, int]]:
    """Writes tiles into a folder. Returns their rows, and the numbers of tiles by label and of those left out.

    A tile has the label that covers most of it. Tiles without data in more than half of their pixels are left out.
    Labels are GeoJSON polygons or a GeoTIFF of classes, in any coordinate reference system.
    """
    with ExitStack() as files:
        raster = files.enter_context(open_raster(scene, "scene"))
        check_scene(raster)
        height, width = raster.dataset.shape
        if options.size > min(height, width):
            size = f"is larger than the scene, {width} x {height} pixels"
            raise ArgumentError.of("size", options.size, f"{size}; give a smaller one")
        if Path(labels).suffix.lower() in (".geojson", ".json"):
            source: _Polygons | _Raster = _read_geojson(labels, options, raster.dataset)
        else:
            source = _Raster(files.enter_context(open_raster(labels, "labels")), raster.dataset)
        tiles, left_out = _write_tiles(raster, source, folder, options)
        inside = (height - height % options.size) * (width - width % options.size)
    if edge := height * width - inside:
        text = "scene=%r: %.1f%% of its area, at the right and lower edges, is too narrow for a tile of %d pixels"
        _LOGGER.warning(text, scene, 100 * edge / (height * width), options.size)
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
    raster: Raster, source: "_Polygons | _Raster", folder: Path, options: TileOptions
) -> tuple[list[tuple[Tile, str, np.ndarray]], dict[str, int]]:
    """Writes the tiles that have a label, a row of the scene at a time."""
    size, tiles, scene = options.size, [], raster.dataset
    left_out = {"without a label": 0, "without data": 0}
    for row in range(scene.height // size):
        codes = source.codes(_window(0, row * size, scene.width, size), scene)
        columns = range(scene.width // size)
        places = places_of(scene, [(column + 0.5) * size for column in columns], [(row + 0.5) * size] * len(columns))
        for column in columns:
            label = _most_frequent(codes[:, column * size : (column + 1) * size], options.cover)
            if label is None:
                left_out["without a label"] += 1
                continue
            window = _window(column * size, row * size, size, size)
            if missing_share(raster.read(raster.opaque, window)[1]) > MOST_MISSING:
                left_out["without data"] += 1
                continue
            (folder / _name((row, column))).write_bytes(raster.copy(window))
            tiles.append(((row, column), source.names[label], places[column]))
    return tiles, left_out


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

    def __init__(self, labels: Raster, scene: Any) -> None:
        dataset = labels.dataset
        if not is_placed(dataset) or dataset.count != 1 or np.dtype(dataset.dtypes[0]).kind not in "iu":
            remedy = "needs one band of whole numbers and a coordinate reference system (CRS); convert it"
            raise DataError(f"labels={labels.path!r}: {remedy}")
        grid = {"crs": scene.crs, "transform": scene.transform, "height": scene.height, "width": scene.width}
        # Transparency marks pixels without a label: those outside of the file, of its nodata value, or of its mask
        self.vrt = import_rasterio().vrt.WarpedVRT(dataset, **grid, add_alpha=True)
        self.path, self.names = labels.path, dict[int, str]()

    def codes(self, window: Any, scene: Any) -> np.ndarray:
        """Returns the code of each pixel of a window, int64 (height, width); 0 for none."""
        with reading(self.path, "labels"):
            # For GDAL's own mask, transparency is of 8 or 16 bits without a sign alone
            values, valid = self.vrt.read(1, window=window).astype(np.int64), self.vrt.read(2, window=window) > 0
        self.names |= {value + (value >= 0): str(value) for value in np.unique(values[valid]).tolist()}
        return np.where(valid, values + (values >= 0), 0)  # a label of 0 is code 1, and -1 stays


def _read_geojson(path: str, options: TileOptions, raster: Any) -> _Polygons:
    rasterio = import_rasterio()
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        features = [table] if table["type"] == "Feature" else table["features"]
        # RFC 7946 has degrees alone, and GDAL names others
        named = ((table.get("crs") or {}).get("properties") or {}).get("name") or "EPSG:4326"
        crs = rasterio.crs.CRS.from_user_input(named)
        given = [(feature["geometry"], (feature.get("properties") or {}).get(options.column)) for feature in features]
        labeled = [(_polygons(shape), text) for shape, label in given if (text := label_text(label))]
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


def label_text(value: object) -> str:
    """Returns the name of a class as a property has it; "" if it names none."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else normalized(str(value).strip())
    return "" if text in MISSING else text


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
    counts = np.ceil(np.abs(np.diff(corners, axis=0)).max(axis=1) / step).clip(1).astype(int)
    places = [edge + part / count for edge, count in enumerate(counts) for part in range(count)]  # in edges
    points = [np.interp([*places, len(counts)], range(len(corners)), axis) for axis in corners.T]
    return np.stack(points, axis=1).tolist()


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
