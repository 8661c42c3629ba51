"""Any folder laid out as DOMAIN/CLASS/IMAGE, read in the order of torchvision's ImageFolder."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from ...errors import DataError, ImageReadError


@dataclass(frozen=True)
class FolderDomain:
    """One domain's folder.

    Attributes:
        name: The folder's name.
        classes: Names of the class folders, sorted.
        targets: One class index per image.
        paths: One file per image, in the same order.
    """

    name: str
    classes: tuple[str, ...]
    targets: Sequence[int] = field(repr=False)
    paths: Sequence[str] = field(repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The file cannot be decoded.
        """
        return read_image(self.paths[index])

    def without(self, positions: Collection[int]) -> "FolderDomain":
        """Returns this domain without the images at some positions."""
        kept = [position for position in range(len(self)) if position not in positions]
        targets = [self.targets[position] for position in kept]
        return replace(self, targets=targets, paths=[self.paths[position] for position in kept])


def read_image(path: str, file: BinaryIO | None = None) -> Image.Image:
    """Reads an image file as RGB.

    Other modes become RGB as PIL's `convert` makes them, so transparency is dropped and not blended; an EXIF rotation
    is ignored. Both are what torchvision's ImageFolder does, and DomainBed with it. It is not followed in two things:
    16 bits become the upper 8, which it cuts off at 255, and a truncated file is an error, whose missing part DomainBed
    fills with grey.

    Args:
        path: The file, and its name in messages.
        file: Where to read instead of opening `path`.

    Raises:
        ImageReadError: The file cannot be decoded.
    """
    try:
        with Image.open(file or path) as image:
            image.load()
            return image if image.mode == "RGB" else _as_rgb(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        remedy = "repair or remove the file, or give --skip-unreadable"
        raise ImageReadError(f"image={path!r}: cannot be decoded ({error}); {remedy}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"mode {image.mode!r} has no fixed range; save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")


def read_folder(data_dir: str | os.PathLike[str]) -> list[FolderDomain]:
    """Reads a folder of domains.

    Domains are the sub-folders in the order of their names, classes the sub-folders of each; images are found as
    torchvision's ImageFolder finds them, in its order, so that DomainBed's splits carry over.

    Args:
        data_dir: The folder that holds the domains.

    Raises:
        DataError: The folder does not exist, holds no domain, or its domains differ in their classes or lack images.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise DataError(f"data_dir={str(root)!r}: no such folder; give the folder that holds one folder per domain")
    names = _subfolders(root)
    if not names:
        raise DataError(f"data_dir={str(root)!r}: holds no domain folders; expected DOMAIN/CLASS/IMAGE below it")
    classes = _common_classes(root, names)
    return [_read_domain(root / name, classes) for name in names]


def _subfolders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _common_classes(root: Path, names: Sequence[str]) -> tuple[str, ...]:
    found = {name: set(_subfolders(root / name)) for name in names}
    everything = set().union(*found.values())
    if not everything:
        raise DataError(f"data_dir={str(root)!r}: no class folders in {', '.join(names)}; expected DOMAIN/CLASS/IMAGE")
    lacking = [
        f"{name!r} lacks {', '.join(sorted(everything - own))}" for name, own in found.items() if own != everything
    ]
    if lacking:
        raise DataError(
            f"data_dir={str(root)!r}: classes differ between domains: {'; '.join(lacking)}; "
            "every domain needs the same class folders (an empty one will do)"
        )
    return tuple(sorted(everything))


def _read_domain(folder: Path, classes: tuple[str, ...]) -> FolderDomain:
    indices = {name: index for index, name in enumerate(classes)}
    samples = make_dataset(str(folder), indices, extensions=IMG_EXTENSIONS, allow_empty=True)
    if not samples:
        raise DataError(f"data_dir={str(folder.parent)!r}: domain {folder.name!r} holds no images ({IMG_EXTENSIONS})")
    paths, targets = zip(*samples, strict=True)
    return FolderDomain(folder.name, classes, targets, paths)
