"""What a domain is: a named list of labelled images, and the random access that every loader builds on.

Domain is the word everywhere in this package; DomainBed calls the same thing an environment.
"""

import os
from collections.abc import Sequence
from typing import Protocol

from PIL import Image

DataDir = str | os.PathLike[str] | None


class Domain(Protocol):
    """A named, ordered list of labelled images.

    The order is part of the contract: splits and draws are positions in it.

    Attributes:
        name: The domain's name, as tables show it.
        classes: Class names; `targets` index them. Equal for all domains of a benchmark.
        targets: One class index per image.
    """

    @property
    def name(self) -> str:
        """The domain's name."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the class indices."""

    @property
    def targets(self) -> Sequence[int]:
        """One class index per image."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The image cannot be decoded; the message names it.
        """
