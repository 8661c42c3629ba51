"""Images of a run that are drawn: their choice, their batches for the network, and their pixels."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...cli.text import one_line
from ...data import Domain, FolderDomain
from ...data.readers.folders import find_images
from ...data.readers.images import Pixels, as_picture, read_pixels
from ...errors import ArgumentError, DataError, ImageReadError
from ..run_view import Batch, RunView
from .map_plots import Photograph, Places, Rows

_logger = logging.getLogger(__name__)
MAX_SIDE = 224  # pixels; larger photographs are reduced, so that files stay small


class ChosenImage(NamedTuple):
    """One image to draw."""

    name: str  # label of the image
    image: Pixels  # as read
    metadata: Tensor | None  # (...) the network's metadata input; None if it takes none
    position: int | None = None  # in its domain; None for a file


ImageRows = list[tuple[str, list[ChosenImage | None]]]  # name of the row, and its images; None for a missing one


def choose_images(view: RunView, images: Sequence[str] | None, target: str | None, columns: int) -> ImageRows:
    """Chooses a class's pictures, by default the first's, from the run or from `images`: a row for each domain."""
    if images is not None:
        return _files(view, images, columns)
    domains = view.domains
    chosen = choose_pictures(domains, class_index(domains, target), columns, view.shares_photographs)
    return [
        (domain.name, [None if position is None else _read(view, domain, position) for position in row])
        for domain, row in zip(domains, chosen, strict=True)
    ]


def _files(view: RunView, images: Sequence[str], columns: int) -> ImageRows:
    if hasattr(view.model, "metadata_encoder"):
        remedy = "the model routes by coordinates, which files do not have; leave out --images"
        raise ArgumentError.of("images", list(images), remedy)
    chosen: list[ChosenImage | None] = []
    for path in find_images(images):
        try:
            chosen.append(ChosenImage(Path(path).name, read_pixels(path, view.bands), None))
        except ImageReadError as error:
            if not view.skip_unreadable:
                raise
            _logger.warning(one_line(f"left out: {error}"))
    if not chosen:
        raise ImageReadError(f"images={list(images)!r}: none can be decoded; repair or remove the files")
    width = min(columns, len(chosen))
    chosen += [None] * (-len(chosen) % width)
    return [("", chosen[start : start + width]) for start in range(0, len(chosen), width)]


def _read(view: RunView, domain: Domain, position: int) -> ChosenImage:
    names = picture_names(domain, by_path=True)
    name = names[position].rpartition("/")[2] if names else f"image {position}"
    return ChosenImage(name, domain.pixels(position), view.metadata(domain, position), position)


def picture_key(path: str) -> str:
    """CLASS/IMAGE of a file without its extension, which copies of a picture in several domains share."""
    return f"{Path(path).parent.name}/{Path(path).stem}"


def picture_names(domain: Domain, by_path: bool) -> list[str] | None:
    """Names of a domain's images, under which other domains have the same picture; None if it has no such names.

    Equal file names mean nothing in general, such as 001.jpg in each hospital. `by_path` says that they do here.
    """
    if domain.pictures is not None:
        return list(domain.pictures)
    return [picture_key(path) for path in domain.paths] if by_path and isinstance(domain, FolderDomain) else None


def class_index(domains: Sequence[Domain], name: str | None) -> int:
    """The index of a class; 0 for None."""
    classes = domains[0].classes
    if name is not None and name not in classes:
        listing = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise DataError(f"class={name!r}: no such class; choose from {listing}")
    return 0 if name is None else classes.index(name)


def choose_pictures(
    domains: Sequence[Domain], target: int, number: int, by_path: bool = False
) -> list[list[int | None]]:
    """Chooses images of a class, a row for each domain, the same picture in the same column.

    Pictures that more domains share come first. If domains share no picture, each row has images of its own. The
    result holds positions in each domain, None for a picture that the domain lacks.
    """
    candidates = [[index for index, label in enumerate(domain.targets) if label == target] for domain in domains]
    if not any(candidates):
        raise DataError(f"class={domains[0].classes[target]!r}: no domain has an image of it; name another class")
    names = [picture_names(domain, by_path) for domain in domains]
    by_name = [
        {domain_names[index]: index for index in rows}
        for domain_names, rows in zip(names, candidates, strict=True)
        if domain_names is not None
    ]
    counts = Counter(name for index_of in by_name for name in index_of)
    if len(by_name) < len(domains) or max(counts.values()) < 2:
        width = min(number, max(map(len, candidates)))
        return [[*rows[:width], *([None] * (width - len(rows)))] for rows in candidates]
    columns = [name for name, _ in counts.most_common(number)]
    return [[index_of.get(name) for name in columns] for index_of in by_name]


def batches(view: RunView, rows: ImageRows) -> Iterator[Batch]:
    """The network's inputs for all images of the rows, in order."""
    return view.batches((image.image, image.metadata) for _, row in rows for image in row if image is not None)


def photographs(rows: ImageRows, values: Tensor, parts: Iterable[Places] = repeat({})) -> Rows:
    """Pairs images with values (B, ...), and with the places of parts, in the order of `batches`."""
    remaining = zip(values, parts, strict=False)
    return [
        (name, [image and Photograph(image.name, small_pixels(image.image), *next(remaining)) for image in row])
        for name, row in rows
    ]


def small_pixels(image: Pixels) -> np.ndarray:
    """uint8 (height, width, 3), reduced to `MAX_SIDE` if larger."""
    small = as_picture(image) if isinstance(image, Tensor) else image.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(small)
