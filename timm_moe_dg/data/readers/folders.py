"""Folders laid out as DOMAIN/CLASS/IMAGE, in the order of torchvision's ImageFolder, among them DomainNet."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ...errors import DataError
from ..domains import DataDir, Domain, file_names
from .images import IMAGE_EXTENSIONS, images_below, read_picture, subfolders

DUPLICATES = "domain_net_duplicates.txt"

_LOGGER = logging.getLogger(__name__)


class FolderDomain(Domain[str | bytes]):
    """One domain of image files: `images` are their paths."""

    @property
    def paths(self) -> list[str]:
        """One path per image."""
        return [os.fsdecode(path) for path in self.images]

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB. Broken files are an `ImageReadError`."""
        return read_picture(self.file(index), self.bands)


def read_folder(data_dir: str | os.PathLike[str]) -> list[FolderDomain]:
    """Reads a folder of domains: sub-folders sorted by name, each with the same class folders.

    Images are in the order of torchvision's ImageFolder, so that DomainBed's splits carry over. Links to folders are
    errors.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise DataError(f"data_dir={str(root)!r}: no such folder; give the folder that holds one folder per domain")
    names = subfolders(root)
    if not names:
        raise DataError(f"data_dir={str(root)!r}: holds no domain folders; expected DOMAIN/CLASS/IMAGE below it")
    classes = _common_classes(root, names)
    return [_read_domain(root / name, classes) for name in names]


def read_domain_net(data_dir: DataDir) -> list[FolderDomain]:
    """Reads DomainNet without the images that its authors later listed as duplicates.

    DomainBed publishes the list as domain_net_duplicates.txt, with one image per line, such as
    clipart/bird/clipart_032_000255.jpg. It is used if it lies in the data folder, among or beside the domains. A copy
    without these images, such as DomainBed's download, needs no list.
    """
    if data_dir is None:
        raise DataError("data_dir=None: give --data-dir, the folder of DomainNet's domains")
    root = Path(data_dir)
    domains = read_folder(root)
    lists = [path for path in (root / DUPLICATES, root.parent / DUPLICATES) if path.is_file()]
    if not lists:
        return domains
    duplicates = _read_list(lists[0])
    unique = [_without_listed(root, domain, duplicates) for domain in domains]
    removed = sum(map(len, domains)) - sum(map(len, unique))
    _LOGGER.info("DomainNet: %d of the %d images listed in %s left out", removed, len(duplicates), lists[0])
    return unique


def _common_classes(root: Path, names: Sequence[str]) -> tuple[str, ...]:
    classes = {name: set(subfolders(root / name)) for name in names}
    all_classes = set().union(*classes.values())
    if not all_classes:
        raise DataError(f"data_dir={str(root)!r}: no class folders in {', '.join(names)}; expected DOMAIN/CLASS/IMAGE")
    differences = [
        f"{name!r} lacks {', '.join(sorted(all_classes - present))}"
        for name, present in classes.items()
        if present != all_classes
    ]
    if differences:
        raise DataError(
            f"data_dir={str(root)!r}: classes differ between domains: {'; '.join(differences)}; "
            "every domain needs the same class folders (an empty one will do)"
        )
    return tuple(sorted(all_classes))


def _read_domain(folder: Path, classes: tuple[str, ...]) -> FolderDomain:
    files = [
        [os.path.join(parent, name) for parent, names in images_below(str(folder / label)) for name in names]
        for label in classes
    ]
    counts = [len(paths) for paths in files]
    if not any(counts):
        raise DataError(f"data_dir={str(folder.parent)!r}: domain {folder.name!r} holds no images ({IMAGE_EXTENSIONS})")
    images = file_names(path for paths in files for path in paths)
    return FolderDomain(folder.name, classes, np.repeat(np.arange(len(classes)), counts), images)


def _read_list(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r}: cannot be read as a list of images ({error})") from error
    return frozenset(line.strip() for line in lines if line.strip())


def _without_listed(root: Path, domain: FolderDomain, listed: frozenset[str]) -> FolderDomain:
    names = [Path(path).relative_to(root).as_posix() for path in domain.paths]
    return domain.without({position for position, name in enumerate(names) if name in listed})
