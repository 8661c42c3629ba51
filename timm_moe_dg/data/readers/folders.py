"""Any folder laid out as DOMAIN/CLASS/IMAGE, read in the order of torchvision's ImageFolder."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import DataError
from ..domains import Domain
from ..pixels import IMAGE_EXTENSIONS
from ..texts import Texts
from .images import images_below, read_picture, subfolders


class FolderDomain(Domain[str]):
    """One domain of image files: `images` are their paths."""

    @property
    def paths(self) -> Sequence[str]:
        """One file per image."""
        return self.images

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The file cannot be decoded.
        """
        return read_picture(self.images[index], self.bands)


def read_folder(data_dir: str | os.PathLike[str]) -> list[FolderDomain]:
    """Reads a folder of domains.

    Domains are the sub-folders in the order of their names, classes the sub-folders of each; images are found as
    torchvision's ImageFolder finds them, in its order, so that DomainBed's splits carry over.

    Args:
        data_dir: The folder that holds the domains.

    Raises:
        DataError: The folder does not exist, holds no domain, or its domains differ in their classes or lack images;
            or a folder cannot be listed, or is a link below a class folder.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise DataError(f"data_dir={str(root)!r}: no such folder; give the folder that holds one folder per domain")
    names = subfolders(root)
    if not names:
        raise DataError(f"data_dir={str(root)!r}: holds no domain folders; expected DOMAIN/CLASS/IMAGE below it")
    classes = _common_classes(root, names)
    return [_read_domain(root / name, classes) for name in names]


def _common_classes(root: Path, names: Sequence[str]) -> tuple[str, ...]:
    found = {name: set(subfolders(root / name)) for name in names}
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
    found = [images_below(str(folder / label)) for label in classes]
    counts = [sum(len(names) for _, names in own) for own in found]
    if not any(counts):
        raise DataError(f"data_dir={str(folder.parent)!r}: domain {folder.name!r} holds no images ({IMAGE_EXTENSIONS})")
    paths = Texts(os.path.join(parent, name) for own in found for parent, names in own for name in names)
    return FolderDomain(folder.name, classes, np.repeat(np.arange(len(classes)), counts), paths)
