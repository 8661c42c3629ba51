"""Domains: named lists of labeled images with random access. DomainBed calls a domain an environment."""

import logging
import os
import re
import unicodedata
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from PIL import Image

from ..errors import DataError
from .bands import RGB_BANDS, Bands
from .readers.images import as_picture, read_pixels
from .readers.rasters import Pixels

DataDir = str | os.PathLike[str] | None
UNGROUPED = "Other"  # images of no group: they count in overall accuracy, but are never the worst group

Stored = TypeVar("Stored")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Split:
    """Positions of one domain's images: `inside` to train on, or to test a test domain; `outside` to validate."""

    inside: np.ndarray
    outside: np.ndarray


@dataclass(frozen=True, eq=False)
class Domain(ABC, Generic[Stored]):
    """A named, ordered list of labeled images. Subclasses define `image`.

    The order is part of the contract: splits and draws are positions in it.
    """

    name: str  # as tables show it
    classes: tuple[str, ...]  # names, indexed by `targets`; the same in all domains of a benchmark
    targets: Sequence[int] | np.ndarray = field(repr=False)  # one class index per image
    images: Sequence[Stored] | np.ndarray = field(repr=False)  # names (see `file_names`), arrays, or rows of a table
    _: KW_ONLY
    role: str = "train"  # or "id" or "ood", if the benchmark reserves the domain for testing
    group: str = ""  # the evaluation group of its images, by default its own name
    metadata: np.ndarray | None = field(default=None, repr=False)  # one row per image, such as longitude and latitude
    split: Split | None = field(default=None, repr=False)  # the official one; None leaves it to `split_domains`
    # A name for each image, equal across domains that hold the same picture
    pictures: Sequence[str] | None = field(default=None, repr=False)
    bands: Bands = RGB_BANDS  # of others, files are read in full depth, and `image` shows the first three or RGB
    upright: bool = True  # whether the EXIF orientation of files is applied, as DomainBed does not
    angle: float = 0.0  # degrees by which its images are turned against other domains, counter-clockwise

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.name)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Reads one image as an RGB picture. If it cannot be decoded, raises `ImageReadError` with its name."""

    def pixels(self, index: int) -> Pixels:
        """Reads one image for a transform: RGB, or float (bands, H, W) of other bands and of more than 8 bits."""
        if self.bands.is_rgb:
            return self.image(index)
        return read_pixels(self.file(index), self.bands, upright=self.upright)

    def file(self, index: int) -> str:
        """Names one image in messages: by its path, its picture's name, or its position."""
        stored = self.images[index]
        if isinstance(stored, str | bytes):
            return os.fsdecode(stored)
        return self.pictures[index] if self.pictures else f"image {index}"

    def without(self, positions: Collection[int]) -> Self:
        """Returns this domain without the images at some positions. An official split loses the same images."""
        remaining = np.array([position for position in range(len(self)) if position not in positions], dtype=int)
        columns = {name: value for name, value in vars(self).items() if isinstance(value, list | np.ndarray)}
        split = self.split
        if split is not None:
            parts = (part[np.isin(part, remaining)] for part in (split.inside, split.outside))
            split = Split(*(np.searchsorted(remaining, part) for part in parts))
        return replace(self, split=split, **{name: take(column, remaining) for name, column in columns.items()})


class FileDomain(Domain[Stored]):
    """A domain of image files, whose `images` are their paths, or of uint8 arrays, gray (H, W) or RGB (H, W, 3)."""

    def image(self, index: int) -> Image.Image:
        """Reads one image as an RGB picture for people. Broken files are an `ImageReadError`."""
        return as_picture(self.pixels(index), self.bands)

    def pixels(self, index: int) -> Pixels:
        """Reads one image for a transform, see `readers.images.read_pixels`. Arrays are turned by `angle`."""
        stored = self.images[index]
        if isinstance(stored, np.ndarray):
            return Image.fromarray(stored).rotate(self.angle, Image.Resampling.BILINEAR).convert("RGB")
        return read_pixels(self.file(index), self.bands, upright=self.upright)


def given_folder(data_dir: DataDir, content: str) -> Path:
    """Returns the folder of a data set. A `DataError` tells its `content` if none was given or there is no such one."""
    if data_dir is None:
        raise DataError(f"data_dir=None: give --data-dir, the folder that holds {content}")
    if not os.path.isdir(data_dir):
        raise DataError(f"data_dir={str(data_dir)!r}: no such folder; give the one that holds {content}")
    return Path(data_dir)


def file_names(paths: Iterable[str]) -> np.ndarray:
    """Stores file names as one array of bytes. `os.fsdecode` turns an entry back into a path."""
    # A list of a million names is a million objects. Each loader worker would copy them all, because reading an object
    # writes its reference count to a memory page that the processes share until then.
    return np.array([os.fsencode(path) for path in paths], dtype=np.bytes_)


def take(column: Sequence[Any] | np.ndarray, positions: np.ndarray) -> Any:
    """Returns the entries at some positions: an array of an array, else a list."""
    if isinstance(column, np.ndarray):
        return column[positions]
    return [column[position] for position in positions.tolist()]


def normalized(name: str) -> str:
    """Returns the composed form of a name (Unicode's NFC). Archives of macOS hold the decomposed one."""
    return unicodedata.normalize("NFC", name)


def check_spellings(source: str, names_and_places: Iterable[tuple[str, str]], kind: str = "classes") -> None:
    """Compares the names of classes, each with the name of a domain that holds images of it, or other names.

    Names that differ by spaces, invisible characters or the form of a number, such as "1" and "1.0", are a `DataError`.
    So are names that differ by case or punctuation and occur in no domain together. Otherwise these are a warning.
    """
    places: dict[str, set[str]] = defaultdict(set)
    for name, place in names_and_places:
        places[name].add(place)
    for plain in (_visible, _loose):
        alike = defaultdict(list)
        for name in places:
            alike[plain(name)].append(name)
        for names in (names for names in alike.values() if len(names) > 1):
            apart = not set.intersection(*(places[name] for name in names))
            show = repr if len({*map(normalized, names)}) == len(names) else ascii
            listing = ", ".join(f"{show(name)} in {listed(places[name])}" for name in names)
            message = f"{source}: these {kind} differ by spelling alone: {listing}"
            if plain is _visible or apart:
                raise DataError(f"{message}; give them one name")
            _LOGGER.warning("%s; they count as different %s", message, kind)


def _visible(name: str) -> str:
    """What a reader sees of a name: single spaces, no invisible characters, numbers without zeros at their ends."""
    shown = "".join(letter for letter in normalized(name) if unicodedata.category(letter) != "Cf")
    shown = " ".join(shown.split())
    return str((Decimal(shown) + 0).normalize()) if _NUMBER.fullmatch(shown) else shown


def _loose(name: str) -> str:
    return re.sub(r"[\s_]+|(?<=\w)-(?=\w)", " ", unicodedata.normalize("NFKC", _visible(name)).casefold())


def listed(domains: Collection[str], limit: int = 3) -> str:
    """Joins the first names, and counts the others."""
    names = sorted(domains)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
