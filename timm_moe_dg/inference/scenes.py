"""Maps of classes on the grid of a georeferenced scene, from windows that may overlap.

A pixel has the mean probabilities of the windows that cover it. These are constant between the edges of windows, so
that a row of windows is stored as its probabilities, and a block of the map is composed from the rows that reach it.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..analysis.geography import domains_at, geo_layers
from ..analysis.style import category_color, optional_picture, picture, swatch
from ..cli.arguments import declared, option
from ..cli.values import positive_int
from ..data.readers.rasters import (
    MOST_MISSING,
    Raster,
    check_scene,
    import_rasterio,
    missing_share,
    open_raster,
    places_of,
)
from ..errors import ArgumentError, CheckpointError, StorageError
from ..layers import LocationIdEmbedding
from ..networks.averages import Ensemble
from ..networks.build import warn_of_other_pixels
from ..networks.trained import (
    WithFeatures,
    metadata_columns,
    metadata_encoder,
    uses_metadata,
    warn_of_unknown_metadata,
)
from ..storage.files import all_or_nothing
from .predict import ImageOptions, PredictOptions
from .predictor import CertaintyOptions, ColumnOptions, LoadedModel

BLOCK = 256  # side of the map's blocks in pixels
CACHE = 256  # MB of decoded blocks; GDAL's default grows with the machine
PREVIEW = 1024  # pixels along the longer side, at most
MOST_NAMES = 16  # classes in a legend, as many as colors that can be told apart
_logger = logging.getLogger(__name__)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """The windows of a scene."""

    window: int | None = option(None, type=positive_int, metavar="PIXELS",
        help="predict a georeferenced scene by windows of this side, as a map: --output MAP.tif")
    stride: int | None = option(None, type=positive_int, metavar="PIXELS",
        help="distance of windows, which are averaged where they overlap (default: --window)")
    experts: bool = option(False, help="MoGE: write the expert of each window as third band of the map")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class SceneOptions(PredictOptions, WindowOptions):
    """All options of predict, for images or a scene."""


def has_scene(options: SceneOptions) -> bool:
    """Returns whether the images are one scene, of which a map is wanted.

    Raises:
        ArgumentError: An option has no effect.
    """
    if options.window is None:
        unused = {name: vars(options)[name] for name in ("stride", "experts") if vars(options)[name]}
        remedy = "has no effect without --window PIXELS; add it"
    else:
        if len(options.images) != 1:
            raise ArgumentError.of("images", options.images, "give one scene with --window")
        of_images = [*declared(ImageOptions), *declared(ColumnOptions), *declared(CertaintyOptions), "shard"]
        given = {name: vars(options)[name] for name in of_images}
        unused = {name: value for name, value in given.items() if value != getattr(SceneOptions, name)}
        remedy = "has no meaning for a scene (--window); leave it out"
    if unused:
        raise ArgumentError.of(*next(iter(unused.items())), remedy)
    return options.window is not None


class Codes(NamedTuple):
    """How the map stores values, in the smallest type that has a number for each class."""

    dtype: str
    nodata: int
    steps: int  # of a probability from 0 to 1

    @property
    def shared(self) -> int:
        """The number in place of an expert where the shared expert alone answers."""
        return self.nodata - 1


EIGHT_BIT, SIXTEEN_BIT = Codes("uint8", 255, 250), Codes("uint16", 65_535, 50_000)


class WindowRow(NamedTuple):
    """A row of N windows."""

    probabilities: np.ndarray  # float32 (N, classes); NaN without data
    experts: np.ndarray  # int64 (N,); negative for the shared expert alone


def predict_scene(options: SceneOptions, model: LoadedModel) -> list[str]:
    """Writes the map of a scene, its colors and names beside it (.aux.xml), and a preview (.png); returns the files.

    The map has the scene's grid and georeference. Its bands are the class, the probability and, if
    wanted, the expert. Pixels without data have none. Memory depends on the width of the scene alone.
    """
    path = _check_output(options)
    names = [path.name, f"{path.name}.aux.xml", path.with_suffix(".png").name]
    with (
        all_or_nothing(path.parent, names, overwrite=options.force) as folder,
        import_rasterio().Env(GDAL_CACHEMAX=CACHE),
        open_raster(options.images[0], "images") as raster,
    ):
        scene = _Scene(options, model, raster)
        try:
            scene.write(folder / path.name)
            with import_rasterio().open(folder / path.name) as file:  # GDAL may lose a block without an error
                for _, window in file.block_windows(1):
                    file.read(window=window)
            unlike, total = scene.unlike
            if unlike:
                _logger.warning(f"{unlike} of {total} windows ({unlike / total:.0%}) are unlike the training images")
            _draw(folder / path.name, folder / names[2], model.classes, scene.codes)
        except import_rasterio().errors.RasterioError as error:
            remedy = "free some space on the disk or choose another"
            raise StorageError(f"output={str(path)!r}: cannot be written to its end ({error}); {remedy}") from error
        (folder / names[1]).write_text(_side_file(model.classes), encoding="utf-8")
        return [str(path.parent / name) for name in names if (folder / name).exists()]  # no picture without matplotlib


def starts(length: int, window: int, stride: int) -> np.ndarray:
    """Returns the first pixels of windows that cover a length. The last window ends with it."""
    regular = np.arange(0, length - window + 1, stride)
    return regular if regular[-1] == length - window else np.append(regular, length - window)


def averaged(rows: Sequence[WindowRow], lefts: np.ndarray, window: int, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
    """Averages the rows of windows that cover the same pixels.

    Returns:
        Class, probability and expert (3, cells), as codes, and the width of each cell in pixels, (cells,).
    """
    edges = np.unique([lefts, lefts + window])
    first = np.searchsorted(lefts, edges[1:] - window)
    end = np.searchsorted(lefts, edges[:-1], side="right")
    stacked = np.stack([row.probabilities for row in rows]).astype(np.float64)
    sums, counts = np.nansum(stacked, axis=0), np.isfinite(stacked[..., 0]).sum(axis=0)
    totals, numbers = (np.cumsum(part, axis=0) for part in (np.insert(sums, 0, 0, axis=0), np.insert(counts, 0, 0)))
    total, number = totals[end] - totals[first], numbers[end] - numbers[first]
    mean = total / np.maximum(number, 1)[:, None]
    # Of the windows that cover a cell, the middle one has the nearest center
    expert = rows[(len(rows) - 1) // 2].experts[(first + end - 1) // 2]
    cells = np.stack([mean.argmax(1), np.rint(mean.max(1) * codes.steps), np.where(expert < 0, codes.shared, expert)])
    return np.where(number > 0, cells, codes.nodata).astype(codes.dtype), np.diff(edges)


class _Scene:
    """A scene with the model that predicts it."""

    def __init__(self, options: SceneOptions, model: LoadedModel, raster: Raster) -> None:
        self.options, self.model, self.raster, self.scene = options, model, raster, raster.dataset
        self.path, self.size = options.images[0], int(options.window or 0)
        stride, (height, width) = options.stride or self.size, self.scene.shape
        check_scene(raster, needs_place=False)
        if not 0 < self.size <= min(height, width):
            remedy = f"is larger than the scene, {width} x {height} pixels; give a smaller one"
            raise ArgumentError.of("window", options.window, remedy)
        if stride > self.size:
            raise ArgumentError.of("stride", stride, f"leaves gaps; give --window {self.size} or less")
        self.tops, self.lefts = (starts(length, self.size, stride) for length in (height, width))
        self.positions = raster.positions(model.bands)
        self._check_memory()
        self.forward = WithFeatures(model.network) if model.judges_features else lambda *given: (model.network(*given),)
        self.unlike = np.zeros(2, int)  # windows unlike the training images, and all that were predicted
        self.is_compared = False  # whether a window was compared with the training images
        self.codes = EIGHT_BIT if len(model.classes) < EIGHT_BIT.nodata else SIXTEEN_BIT
        self.columns = self._metadata_columns()
        if options.experts and (isinstance(model.network, Ensemble) or self.columns is None):
            raise ArgumentError.of("experts", True, "the model chooses no experts by coordinates; leave it out")
        if options.experts:
            geo_layers(model.network)

    def _check_memory(self) -> None:
        """Refuses windows whose values, in float32 beside those of the file, need most of the machine's memory."""
        pixel = len(self.positions) * (np.dtype(self.scene.dtypes[0]).itemsize + 9)  # bytes
        needed, memory = pixel * self.size**2, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory / 2:
            remedy = f"needs about {needed / 1e9:.0f} GB, and the machine has {memory / 1e9:.0f} GB; give a smaller one"
            raise ArgumentError.of("window", self.size, remedy)

    def _metadata_columns(self) -> int | None:
        """Number of columns of the windows' metadata; None if the network does not read coordinates."""
        encoder, windows = metadata_encoder(self.model.network), len(self.tops) * len(self.lefts)
        if encoder is None:
            return None
        if isinstance(encoder, LocationIdEmbedding):
            warn_of_unknown_metadata(self.model.network, windows, windows)
            return None
        check_scene(self.raster)
        if columns := metadata_columns(self.model.network):
            _logger.warning(f"the model also reads {', '.join(columns)}, which are unknown of a scene")
        return 2 + len(columns)

    def write(self, path: Path) -> None:
        """Writes the map, a row of blocks at a time."""
        rasterio, raster, rows = import_rasterio(), self.scene, dict[int, WindowRow]()
        names = ("class", "probability", f"expert, {self.codes.shared}: shared alone")[
            : 3 if self.options.experts else 2
        ]
        points, system = raster.gcps  # ground control points, in place of a transform
        place = {"gcps": points, "crs": system} if points else {"transform": raster.transform, "crs": raster.crs}
        profile = {"count": len(names), "height": raster.height, "width": raster.width, "rpcs": raster.rpcs, **place}
        profile |= {
            "dtype": self.codes.dtype,
            "nodata": self.codes.nodata,
            "compress": "deflate",
            "bigtiff": "if_safer",
        }
        profile |= {"tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK, "photometric": "minisblack"}
        todo, progress = list(self.tops.tolist()), tqdm(total=len(self.tops), unit="row", disable=None)
        with rasterio.open(path, "w", driver="GTiff", **profile) as file, progress:
            if len(names) == 2:  # GDAL has no color table beside a third band
                file.write_colormap(1, _colors(self.model.classes))
            file.descriptions, file.scales = names, [1, 1 / self.codes.steps, 1][: len(names)]
            file.update_tags(1, classes=json.dumps(self.model.classes))
            for top in range(0, raster.height, BLOCK):
                bottom = min(top + BLOCK, raster.height)
                while todo and todo[0] < bottom:
                    start = todo.pop(0)
                    rows[start] = self.predict_row(start)
                    progress.update()
                rows = {start: row for start, row in rows.items() if start + self.size > top}
                block = self.compose(rows, top, bottom)
                file.write(block[: len(names)], window=self.part(0, top, raster.width, bottom - top))

    @torch.inference_mode()
    def predict_row(self, top: int) -> WindowRow:
        """Predicts the windows that start at a row of pixels."""
        count = len(self.lefts)
        probabilities = np.full((count, len(self.model.classes)), np.nan, np.float32)
        centers = self.lefts + self.size / 2
        metadata = torch.full((count, self.columns or 2), torch.nan)
        if self.columns:
            metadata[:, :2] = torch.from_numpy(places_of(self.scene, centers.tolist(), [top + self.size / 2] * count))
        experts = domains_at(self.model.network, metadata).numpy() if self.options.experts else np.full(count, -1)
        for batch in np.array_split(np.arange(count), -(-count // self.options.batch_size)):
            views = dict(self.read_windows(top, batch))
            if not views:
                continue
            present, images = list(views), torch.stack(list(views.values())).to(self.model.device)
            more = (metadata[present].to(self.model.device),) if self.columns else ()
            logits, *features = self.forward(images, *more)
            logits = logits.float()
            predicted = (logits / self.model.temperature).softmax(dim=1).cpu().numpy()
            if not np.isfinite(predicted).all():
                raise CheckpointError(f"model={self.model.name!r}: its logits are NaN; give another checkpoint")
            probabilities[present] = predicted
            if self.model.calibration is not None:
                is_routed = uses_metadata(self.model.network, images, *more)
                unlike = self.model.calibration.unlike(images, features[0] if features else None, is_routed)
                self.unlike += np.array([int(unlike.sum()), len(present)])
        return WindowRow(probabilities, experts)

    def read_windows(self, top: int, numbers: np.ndarray) -> Iterator[tuple[int, Tensor]]:
        """Yields inputs for windows of a row by number, without those that lack data in more than half of it."""
        for number in numbers.tolist():
            place = self.part(int(self.lefts[number]), top, self.size, self.size)
            values, missing = self.raster.read(self.positions, place)
            if missing_share(missing) <= MOST_MISSING:
                pixels = self.raster.converted(values, missing, self.model.bands, self.positions)
                if not self.is_compared:
                    warn_of_other_pixels(self.model.network, self.path, pixels)
                    self.is_compared = True
                yield number, self.model.view(pixels)

    def part(self, left: int, top: int, width: int, height: int) -> Any:
        """Returns a window of rasterio's."""
        return import_rasterio().windows.Window(left, top, width, height)

    def compose(self, rows: dict[int, WindowRow], top: int, bottom: int) -> np.ndarray:
        """Returns rows of pixels of the map, (3, bottom - top, width)."""
        block = np.empty((3, bottom - top, self.scene.width), self.codes.dtype)
        edges = {top, bottom, *(edge for start in rows for edge in (start, start + self.size) if top < edge < bottom)}
        for upper, lower in pairwise(sorted(edges)):
            covering = [row for start, row in rows.items() if start <= upper and start + self.size >= lower]
            cells, widths = averaged(covering, self.lefts, self.size, self.codes)
            block[:, upper - top : lower - top] = np.repeat(cells, widths, axis=1)[:, None]
        _, missing = self.raster.read(self.positions, self.part(0, top, self.scene.width, bottom - top))
        if missing is not None:
            block[:, missing.all(axis=0)] = self.codes.nodata
        return block


def _check_output(options: SceneOptions) -> Path:
    if options.output is None or Path(options.output).suffix.lower() not in (".tif", ".tiff"):
        raise ArgumentError.of("output", options.output, "give the file of the map, such as --output map.tif")
    path = Path(options.output)
    if path.exists() and path.resolve() == Path(options.images[0]).resolve():
        raise ArgumentError.of("output", options.output, "is the scene itself; name another file")
    return path


def _colors(classes: Sequence[str]) -> dict[int, tuple[int, ...]]:
    return {code: (*bytes.fromhex(category_color(code)[1:]), 255) for code in range(len(classes))}


def _side_file(classes: Sequence[str]) -> str:
    """GDAL's file of colors and names beside a map, which QGIS shows."""
    colors = [f'<Entry c1="{c[0]}" c2="{c[1]}" c3="{c[2]}" c4="{c[3]}"/>' for c in _colors(classes).values()]
    names = [f"<Category>{escape(name)}</Category>" for name in classes]
    tables = f"<ColorTable>{''.join(colors)}</ColorTable><CategoryNames>{''.join(names)}</CategoryNames>"
    band = f'<PAMRasterBand band="1"><ColorInterp>Palette</ColorInterp>{tables}</PAMRasterBand>'
    return f"<PAMDataset>{band}</PAMDataset>\n"


def _draw(source: Path, target: Path, classes: Sequence[str], codes: Codes) -> None:
    """Draws the classes of a map, with a legend of the most frequent ones."""
    with import_rasterio().open(source) as file:
        reduction = max(1, max(file.shape) / PREVIEW)
        height, width = (max(1, round(side / reduction)) for side in file.shape)
        values = file.read(1, out_shape=(height, width))
    counts = np.bincount(values.ravel(), minlength=codes.nodata + 1)
    table = np.full((len(counts), 3), 255, np.uint8)
    table[: len(classes)] = [color[:3] for color in _colors(classes).values()]
    shown = sorted(np.argsort(-counts[: len(classes)], kind="stable")[:MOST_NAMES].tolist())
    side = 7.0  # inches
    with optional_picture(target) as path, picture(path, side, min(side * height / width, 2 * side) + 1) as figure:
        axes = figure.subplots()
        axes.imshow(table[values], interpolation="nearest")
        axes.set_axis_off()
        handles = [swatch(category_color(code), classes[code]) for code in shown if counts[code]]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
