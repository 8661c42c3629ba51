"""Folders of images: their files, and domains laid out as DOMAIN/CLASS/IMAGE.

The order is that of torchvision's ImageFolder.
"""

import glob
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..domains import DataDir, FileDomain, check_spellings, file_names, given_folder, listed, normalized
from .images import image_extensions

MAX_KINDS = 8  # in a message
# Written beside images by macOS's archives, Windows and network drives
SYSTEM_NAMES = {"__macosx", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r", "@eadir", "@tmp"}
SYSTEM_NAMES |= {"@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin", "system volume information"}
SYSTEM_NAMES |= {"lost+found", "network trash folder", "temporary items", "__pycache__"}
DEPTH = 3  # of DOMAIN/CLASS/IMAGE
_LOGGER = logging.getLogger(__name__)


def walk_images(folder: str, left_out: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yields folder and name of each image, to any depth, in the order of paths, with one folder's names in memory.

    Images are files with an extension that Pillow reads. `left_out` counts the others by their extension. Hidden files
    and folders are skipped, see `is_hidden`. Links to files are followed. Links to folders are errors: they could form
    a circle, or lead to images that are listed elsewhere.
    """
    suffixes = image_extensions()
    # With the separator, names of folders sort as paths do
    for name in sorted(name + os.sep * is_folder for name, is_folder in _visible(folder)):
        path = os.path.join(folder, name.removesuffix(os.sep))
        if name.endswith(os.sep):
            if os.path.islink(path):
                raise DataError(f"folder={path!r}: is a link, which is not followed here; put the images in its place")
            yield from walk_images(path, left_out)
        elif name.lower().endswith(suffixes):
            yield folder, name
        else:
            left_out[kind_of(name)] += 1


def kind_of(name: str) -> str:
    """Names the kind of a file by its extension, such as ".heic"."""
    return os.path.splitext(name)[1].lower() or "no extension"


def describe_left_out(left_out: Counter[str]) -> str:
    """Counts files that are no images by their kind, the most frequent ones first."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in left_out.most_common(MAX_KINDS))
    more = f" and {len(left_out) - MAX_KINDS} more kinds" if len(left_out) > MAX_KINDS else ""
    return f"left out, since Pillow does not read such files: {kinds}{more}"


def is_hidden(path: str) -> bool:
    """Whether a file or folder starts with a dot, such as ._x.png of macOS, or belongs to an operating system."""
    name = os.path.basename(path)
    return name.startswith(".") or name.casefold().partition(":")[0] in SYSTEM_NAMES


def subfolders(folder: str | os.PathLike[str]) -> list[str]:
    """Lists the names of a folder's folders, sorted, with links and without hidden ones. All must be UTF-8."""
    visible = _visible(folder)
    names = sorted(name for name, is_folder in visible if is_folder)
    paths = sorted(os.path.join(folder, name) for name, _ in visible)
    if broken := [path for path in paths if not os.path.exists(path)]:
        _LOGGER.warning("links to nothing are left out: %s", ", ".join(broken))
    for name in names:
        # Python puts surrogates in place of bytes that it cannot decode
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise DataError(f"folder={os.path.join(folder, name)!r}: its name is not UTF-8; rename it")
    return names


def _visible(folder: str | os.PathLike[str]) -> list[tuple[str, bool]]:
    """Lists the names in a folder that are not hidden, and whether each is a folder."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries if not is_hidden(entry.name)]
    except OSError as error:
        raise DataError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable") from error


def find_images(sources: Sequence[str]) -> Iterator[str]:
    """Yields image files in the order of the sources, sorted by path within each, every file once.

    Sources are files with any extension, patterns with *, ? and **, or folders, in which files with an extension that
    Pillow reads are searched at any depth. The log counts the other files of folders. One folder's names are in memory.
    """
    left_out: Counter[str] = Counter()
    folders, files = list[str](), set[str]()  # absolute paths of what was yielded before
    for source in sources:
        is_empty = True
        for path in _paths_of(source, left_out):
            is_empty, place = False, os.path.abspath(path)
            if place in files or any(_is_image_below(place, folder) for folder in folders):
                continue
            if not os.path.isdir(source):
                files.add(place)
            yield path
        if is_empty:
            remark = f"; {describe_left_out(left_out)}" if left_out else ""
            raise DataError(f"images={source!r}: no such file, or no image below or matching it{remark}")
        if os.path.isdir(source):
            folders.append(os.path.abspath(source))
    if left_out:
        _LOGGER.warning("images: %s", describe_left_out(left_out))


def _paths_of(source: str, left_out: Counter[str]) -> Iterable[str]:
    if os.path.isfile(source):
        return [source]
    if os.path.isdir(source):
        return (os.path.join(folder, name) for folder, name in walk_images(source, left_out))
    named, matches = set(Path(source).parts), glob.glob(source, recursive=True)
    if "**" not in source and (folders := sum(os.path.isdir(path) and not is_hidden(path) for path in matches)):
        _warn_of_folders(source, folders)
    paths = filter(os.path.isfile, matches)
    return sorted(path for path in paths if not any(map(is_hidden, set(Path(path).parts) - named - {".."})))


@cache  # once in a process, because a pattern is read more than once
def _warn_of_folders(pattern: str, count: int) -> None:
    _LOGGER.warning("images=%r: matches folders (%d), which are not searched; use ** to search them", pattern, count)


def _is_image_below(path: str, folder: str) -> bool:
    """Whether `walk_images` yields a file of a folder, both absolute."""
    below = path.removeprefix(os.path.join(folder, ""))
    return below != path and path.lower().endswith(image_extensions()) and not any(map(is_hidden, below.split(os.sep)))


class FolderDomain(FileDomain[str | bytes]):
    """One domain of image files: `images` are their paths."""

    @property
    def paths(self) -> list[str]:
        """One path per image."""
        return [os.fsdecode(path) for path in self.images]


def read_folder(data_dir: DataDir, evaluating: bool = False) -> list[FolderDomain]:
    """Reads a folder of domains: sub-folders sorted by name, each with the same class folders.

    Images are in the order of torchvision's ImageFolder, so that DomainBed's splits carry over. Files of kinds that
    Pillow does not read are counted in the log. Links to folders are errors, and so are classes that differ between
    domains or have no image. Data for `evaluating` a network alone may lack classes.
    """
    root = given_folder(data_dir, "DOMAIN/CLASS/IMAGE")
    source, names = f"data_dir={str(root)!r}", subfolders(root)
    if not names:
        raise DataError(f"{source}: holds no domain folders; expected DOMAIN/CLASS/IMAGE below it")
    check_spellings(source, ((name, "this folder") for name in names), "domains")
    places = {os.path.realpath(root / name): name for name in names}
    if doubled := sorted({*names} - {*places.values()}):  # which would be held out and trained on
        raise DataError(f"{source}: the domain {doubled[0]!r} has two names; remove the link to it")
    left_out: Counter[str] = Counter()
    listings = {name: _images_of_classes(root / name, left_out) for name in names}
    classes = tuple(sorted(set().union(*listings.values())))
    if not classes:
        raise DataError(f"{source}: no class folders in {', '.join(names)}; expected DOMAIN/CLASS/IMAGE")
    _check_classes(source, listings, classes, left_out, evaluating)
    if left_out:
        _LOGGER.warning("%s: %s", source, describe_left_out(left_out))
    if loose := [path for folder in (root, *map(root.joinpath, names)) for path in _loose_images(folder)]:
        _LOGGER.warning("%s: %d images in no class folder are left out, such as %r", source, len(loose), loose[0])
    domains = [_domain(name, listing, classes) for name, listing in listings.items()]
    if all(len(Path(path).relative_to(root).parts) > DEPTH for domain in domains for path in domain.paths):
        text = "%s: all images lie in folders of the classes %s; if these are domains, give the folder of them"
        _LOGGER.warning(text, source, listed(classes))
    return domains


def _loose_images(folder: Path) -> list[str]:
    images = (path for path in folder.iterdir() if path.name.lower().endswith(image_extensions()) and path.is_file())
    return sorted(str(path) for path in images if not is_hidden(path.name))


def _images_of_classes(folder: Path, left_out: Counter[str]) -> dict[str, list[str]]:
    """The images of each class of a domain. Two spellings of a name in Unicode are one class."""
    images: dict[str, list[str]] = {}
    for name in subfolders(folder):
        places = sorted(walk_images(str(folder / name), left_out))
        images.setdefault(normalized(name), []).extend(os.path.join(*place) for place in places)
    return images


def _check_classes(
    source: str,
    listings: Mapping[str, Mapping[str, list[str]]],
    classes: Sequence[str],
    left_out: Counter[str],
    evaluating: bool,
) -> None:
    """Refuses classes that differ between domains, and domains and classes without images."""
    places = {label: [name for name, images in listings.items() if images.get(label)] for label in classes}
    check_spellings(source, ((label, name) for label, names in places.items() for name in names))
    lacking = {name: [label for label in classes if label not in images] for name, images in listings.items()}
    if any(lacking.values()) and not evaluating:
        differences = "; ".join(f"{name!r} lacks {', '.join(labels)}" for name, labels in lacking.items() if labels)
        remedy = "every domain needs the same class folders (an empty one will do)"
        raise DataError(f"{source}: classes differ between domains: {differences}; {remedy}")
    remark = f"; {describe_left_out(left_out)}" if left_out else ""
    if bare := [name for name, images in listings.items() if not any(images.values())]:
        raise DataError(f"{source}: domain {bare[0]!r} holds no images{remark}")
    if (empty := [label for label, names in places.items() if not names]) and not evaluating:
        remedy = f"add images, or remove these folders{remark}"
        raise DataError(f"{source}: no domain holds an image of the classes {', '.join(map(repr, empty))}; {remedy}")


def _domain(name: str, images: Mapping[str, list[str]], classes: tuple[str, ...]) -> FolderDomain:
    files = [images.get(label, []) for label in classes]
    targets = np.repeat(np.arange(len(classes)), list(map(len, files)))
    return FolderDomain(normalized(name), classes, targets, file_names(path for paths in files for path in paths))
