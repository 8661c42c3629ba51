"""Folders laid out as DOMAIN/CLASS/IMAGE, in the order of torchvision's ImageFolder, among them DomainNet."""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..bands import image_extensions
from ..class_names import check_spellings, listed, normalized
from ..domains import DataDir, FileDomain, file_names
from .images import describe_left_out, images_below, is_hidden, subfolders

DEPTH = 3  # of DOMAIN/CLASS/IMAGE
DUPLICATES = "domain_net_duplicates.txt"

_LOGGER = logging.getLogger(__name__)


class FolderDomain(FileDomain[str | bytes]):
    """One domain of image files: `images` are their paths."""

    @property
    def paths(self) -> list[str]:
        """One path per image."""
        return [os.fsdecode(path) for path in self.images]


def read_folder(data_dir: str | os.PathLike[str], evaluating: bool = False) -> list[FolderDomain]:
    """Reads a folder of domains: sub-folders sorted by name, each with the same class folders.

    Images are in the order of torchvision's ImageFolder, so that DomainBed's splits carry over. Files of kinds that
    Pillow does not read are counted in the log. Links to folders are errors, and so are classes that differ between
    domains or have no image. Data for `evaluating` a network alone may lack classes.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise DataError(f"data_dir={str(root)!r}: no such folder; give the folder that holds one folder per domain")
    names = subfolders(root)
    if not names:
        raise DataError(f"data_dir={str(root)!r}: holds no domain folders; expected DOMAIN/CLASS/IMAGE below it")
    check_spellings(f"data_dir={str(root)!r}", dict.fromkeys(names, ("this folder",)), "domains")
    places = {os.path.realpath(root / name): name for name in names}
    if doubled := sorted({*names} - {*places.values()}):  # which would be held out and trained on
        raise DataError(f"data_dir={str(root)!r}: the domain {doubled[0]!r} has two names; remove the link to it")
    left_out: Counter[str] = Counter()
    listings = {name: _images_of_classes(root / name, left_out) for name in names}
    classes = tuple(sorted(set().union(*listings.values())))
    if not classes:
        raise DataError(f"data_dir={str(root)!r}: no class folders in {', '.join(names)}; expected DOMAIN/CLASS/IMAGE")
    _check_classes(root, listings, classes, describe_left_out(left_out) if left_out else "", evaluating)
    if left_out:
        _LOGGER.warning("data_dir=%r: %s", str(root), describe_left_out(left_out))
    if loose := [path for folder in (root, *map(root.joinpath, names)) for path in _loose_images(folder)]:
        _LOGGER.warning(
            "data_dir=%r: %d images in no class folder are left out, such as %r", str(root), len(loose), loose[0]
        )
    domains = [_domain(name, listing, classes) for name, listing in listings.items()]
    if all(len(Path(path).relative_to(root).parts) > DEPTH for domain in domains for path in domain.paths):
        text = "data_dir=%r: all images lie in folders of the classes %s; if these are domains, give the folder of them"
        _LOGGER.warning(text, str(root), listed(classes))
    return domains


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


def _loose_images(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.path for entry in entries if entry.name.lower().endswith(image_extensions()) and entry.is_file()]
    return sorted(name for name in names if not is_hidden(name))


def _images_of_classes(folder: Path, left_out: Counter[str]) -> dict[str, list[str]]:
    """The images of each class of a domain. Two spellings of a name in Unicode are one class."""
    images: dict[str, list[str]] = {}
    for name in subfolders(folder):
        paths = [
            os.path.join(parent, image)
            for parent, names in images_below(str(folder / name), left_out)
            for image in names
        ]
        images.setdefault(normalized(name), []).extend(paths)
    return images


def _check_classes(
    root: Path, listings: Mapping[str, Mapping[str, list[str]]], classes: Sequence[str], left_out: str, evaluating: bool
) -> None:
    source = f"data_dir={str(root)!r}"
    places = {label: [name for name, images in listings.items() if images.get(label)] for label in classes}
    check_spellings(source, {label: names for label, names in places.items() if names})
    differences = [
        f"{name!r} lacks {', '.join(label for label in classes if label not in images)}"
        for name, images in listings.items()
        if len(images) < len(classes)
    ]
    if differences and not evaluating:
        raise DataError(
            f"{source}: classes differ between domains: {'; '.join(differences)}; "
            "every domain needs the same class folders (an empty one will do)"
        )
    remark = f"; {left_out}" if left_out else ""
    for name, images in listings.items():
        if not any(images.values()):
            raise DataError(f"{source}: domain {name!r} holds no images{remark}")
    if (empty := [label for label, names in places.items() if not names]) and not evaluating:
        remedy = f"add images, or remove these folders{remark}"
        raise DataError(f"{source}: no domain holds an image of the classes {', '.join(map(repr, empty))}; {remedy}")


def _domain(name: str, images: Mapping[str, list[str]], classes: tuple[str, ...]) -> FolderDomain:
    files = [images.get(label, []) for label in classes]
    targets = np.repeat(np.arange(len(classes)), list(map(len, files)))
    return FolderDomain(normalized(name), classes, targets, file_names(path for paths in files for path in paths))


def _read_list(path: Path) -> frozenset[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r}: cannot be read as a list of images ({error})") from error
    return frozenset(line.strip() for line in lines if line.strip())


def _without_listed(root: Path, domain: FolderDomain, listed: frozenset[str]) -> FolderDomain:
    names = [Path(path).relative_to(root).as_posix() for path in domain.paths]
    return domain.without({position for position, name in enumerate(names) if name in listed})
