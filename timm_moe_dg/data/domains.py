"""Domains: named lists of labeled images with random access. DomainBed calls a domain an environment."""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
from PIL import Image

from .band_names import RGB, Bands
from .bands import Pixels, as_picture
from .readers.images import read_pixels

DataDir = str | os.PathLike[str] | None
UNGROUPED = "Other"  # images of no group: they count in overall accuracy, but are never the worst group

Stored = TypeVar("Stored")


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
    bands: Bands = RGB  # of others, files are read in full depth, and `image` shows the first three or RGB
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
        if self.bands == RGB:
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
        return replace(
            self,
            targets=take(self.targets, remaining),
            images=take(self.images, remaining),
            metadata=None if self.metadata is None else self.metadata[remaining],
            pictures=self.pictures and take(self.pictures, remaining),
            split=self.split
            and Split(_renumbered(self.split.inside, remaining), _renumbered(self.split.outside, remaining)),
        )


class FileDomain(Domain[Stored]):
    """A domain of image files, whose `images` are their paths."""

    def image(self, index: int) -> Image.Image:
        """Reads one image as an RGB picture for people. Broken files are an `ImageReadError`."""
        return as_picture(self.pixels(index), self.bands)

    def pixels(self, index: int) -> Pixels:
        """Reads one image for a transform, see `readers.images.read_pixels`."""
        return read_pixels(self.file(index), self.bands, upright=self.upright)


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


def _renumbered(part: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    """Positions, among the remaining images, of those that are in a part of a split."""
    return np.searchsorted(remaining, part[np.isin(part, remaining)])
