"""What a domain is: a named list of labeled images, and the random access that every loader builds on.

Domain is the word everywhere in this package; DomainBed calls the same thing an environment.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Self, TypeVar

import numpy as np
from PIL import Image

from .bands import read_bands
from .pixels import RGB, Pixels
from .texts import take

DataDir = str | os.PathLike[str] | None
UNGROUPED = "Other"  # the group of images that belong to none: counted overall, but never the worst group

Stored = TypeVar("Stored")


@dataclass(frozen=True)
class Split:
    """Positions of one domain's images.

    Attributes:
        inside: The "in" part; training draws from it, and a test domain's accuracy is reported on it.
        outside: The "out" part, for validation.
    """

    inside: np.ndarray
    outside: np.ndarray


@dataclass(frozen=True, eq=False)
class Domain(ABC, Generic[Stored]):
    """A named, ordered list of labeled images, each kept as its reader likes: a path, pixels, a row of a table.

    The order is part of the contract: splits and draws are positions in it. A reader of a new layout says how one of
    its images is read; all else has a default.

    Attributes:
        name: The domain's name, as tables show it.
        classes: Class names; `targets` index them. Equal for all domains of a benchmark.
        targets: One class index per image; an array where there are many.
        images: The images as they are stored; `Texts` where they are many files.
        role: "train", or "id" or "ood" where the benchmark sets a domain apart for testing.
        group: The evaluation group that its images belong to; its own name unless given.
        metadata: One row per image, such as longitude and latitude; None without any.
        split: The official one; None leaves it to `split_domains`.
        pictures: A name for each image, by which other domains hold the same picture; None without names.
        bands: Of its images. Other than three are read from files whole; `image` then shows the first three.
        angle: Degrees by which its pictures are turned, counter-clockwise, beside those of other domains.
    """

    name: str
    classes: tuple[str, ...]
    targets: Sequence[int] | np.ndarray = field(repr=False)
    images: Sequence[Stored] = field(repr=False)
    role: str = field(default="train", kw_only=True)
    group: str = field(default="", kw_only=True)
    metadata: np.ndarray | None = field(default=None, kw_only=True, repr=False)
    split: Split | None = field(default=None, kw_only=True, repr=False)
    pictures: Sequence[str] | None = field(default=None, kw_only=True, repr=False)
    bands: int = field(default=RGB, kw_only=True)
    angle: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        if not self.group:
            object.__setattr__(self, "group", self.name)

    def __len__(self) -> int:
        return len(self.targets)

    @abstractmethod
    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The image cannot be decoded; the message names it.
        """

    def pixels(self, index: int) -> Pixels:
        """Reads one image as transforms take it: RGB, or where a file's bands are others, float (bands, H, W).

        Raises:
            ImageReadError: As `image`.
        """
        if self.bands == RGB:
            return self.image(index)
        return read_bands(self.file(index), self.bands)

    def file(self, index: int) -> str:
        """Names one image for people: its path, or what the data calls it, or its number."""
        stored = self.images[index]
        if isinstance(stored, str):
            return stored
        return self.pictures[index] if self.pictures else f"image {index}"

    def without(self, positions: Collection[int]) -> Self:
        """Returns this domain without the images at some positions; an official split keeps the others."""
        kept = np.array([position for position in range(len(self)) if position not in positions], dtype=int)
        return replace(
            self,
            targets=take(self.targets, kept),
            images=take(self.images, kept),
            metadata=None if self.metadata is None else self.metadata[kept],
            pictures=self.pictures and take(self.pictures, kept),
            split=self.split and Split(*(_renumbered(part, kept) for part in (self.split.inside, self.split.outside))),
        )


def _renumbered(part: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Positions of a part's members among those that are kept."""
    return np.searchsorted(kept, part[np.isin(part, kept)])
