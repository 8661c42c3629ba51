"""Which images of a run are drawn, and what the network makes of them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data import Domain, FolderDomain
from ...data.bands import Pixels, as_picture
from ...data.readers import find_images, read_pixels
from ...errors import ArgumentError, DataError
from ..run_view import RunView
from .map_plots import Photograph, Rows

SIDE = 224  # pixels; larger photographs are reduced to it, so that the files stay small


class Shown(NamedTuple):
    """One image to draw.

    Attributes:
        name: What is written beside it.
        image: As the network takes it.
        metadata: (...) what the network takes besides; None for nothing.
    """

    name: str
    image: Pixels
    metadata: Tensor | None


ShownRows = list[tuple[str, list[Shown | None]]]


def shown_images(
    view: RunView, data_dir: str | None, images: Sequence[str] | None, target: str | None, columns: int
) -> ShownRows:
    """Images of one class, a row for each domain and the same picture in one column; or files, in rows.

    Args:
        view: The run.
        data_dir: Where its data lies now; None for where it lay.
        images: Files, folders or patterns, instead of the run's data.
        target: Name of the class; None for the first.
        columns: Images side by side.

    Raises:
        ArgumentError: The network needs metadata, which files lack.
        DataError: There is no such image, class or data.
        ImageReadError: An image cannot be decoded.
    """
    if images is not None:
        return _files(view, images, columns)
    domains = view.domains(data_dir)
    chosen = choose_pictures(domains, class_index(domains, target), columns)
    return [(each.name, [_shown(view, each, at) for at in row]) for each, row in zip(domains, chosen, strict=True)]


def _files(view: RunView, images: Sequence[str], columns: int) -> ShownRows:
    if hasattr(view.model, "metadata_encoder"):
        remedy = "the model routes by where an image was taken, which files do not say; leave it out for the run's data"
        raise ArgumentError.of("images", list(images), remedy)
    paths = find_images(images)
    shown: list[Shown | None] = [Shown(_stem(path), read_pixels(path, view.in_chans), None) for path in paths]
    shown += [None] * (-len(shown) % min(columns, len(shown)))
    width = min(columns, len(shown))
    return [("", shown[start : start + width]) for start in range(0, len(shown), width)]


def _shown(view: RunView, domain: Domain, position: int | None) -> Shown | None:
    if position is None:
        return None
    names = picture_names(domain)
    name = _stem(names[position]) if names else f"image {position}"
    return Shown(name, domain.pixels(position), view.metadata(domain, position))


def seen(view: RunView, rows: ShownRows, ask: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Asks a function of (model, images, metadata) about all images, and yields the answers in order.

    Args:
        view: The run.
        rows: From `shown_images`.
        ask: Gives (B, ...) for a batch.
    """
    shown = [each for _, row in rows for each in row if each is not None]
    for start in range(0, len(shown), view.batch_size):
        part = shown[start : start + view.batch_size]
        images = view.inputs([each.image for each in part])
        metadata = [each.metadata for each in part if each.metadata is not None]
        yield from ask(view.model, images, torch.stack(metadata).to(view.device) if metadata else None)


def photographs(rows: ShownRows, values: Sequence[Tensor]) -> Rows:
    """Puts values in the order of `seen` onto the images that they belong to."""
    rest = iter(values)
    return [
        (name, [each and Photograph(each.name, pixels(each.image), next(rest)) for each in row]) for name, row in rows
    ]


def pixels(image: Pixels) -> np.ndarray:
    """uint8 (height, width, 3), reduced if it is large."""
    small = as_picture(image) if isinstance(image, Tensor) else image.copy()
    small.thumbnail((SIDE, SIDE))
    return np.asarray(small)


def _stem(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def picture_key(path: str) -> str:
    """CLASS/IMAGE of a file, without its extension: what copies of a picture in several domains have in common."""
    return f"{Path(path).parent.name}/{Path(path).stem}"


def picture_names(domain: Domain) -> list[str] | None:
    """A name for each image, by which other domains may hold the same picture: its own, or a file's; None without."""
    if domain.pictures is not None:
        return list(domain.pictures)
    return [picture_key(path) for path in domain.paths] if isinstance(domain, FolderDomain) else None


def class_index(domains: Sequence[Domain], name: str | None) -> int:
    """The index of a class by its name; of the first class for None.

    Raises:
        DataError: There is no such class.
    """
    classes = domains[0].classes
    if name is not None and name not in classes:
        shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise DataError(f"class={name!r}: no such class; choose from {shown}")
    return 0 if name is None else classes.index(name)


def choose_pictures(domains: Sequence[Domain], target: int, number: int) -> list[list[int | None]]:
    """Positions of a class's images, a row for each domain; the same picture is in the same column.

    Pictures that more domains share come first. Where domains share none, each row has images of its own.

    Args:
        domains: All rows.
        target: Index of the class.
        number: Columns, at most.

    Returns:
        For each domain a list of positions; None where it lacks the picture.

    Raises:
        DataError: No domain has an image of the class.
    """
    own = [[position for position, label in enumerate(domain.targets) if label == target] for domain in domains]
    if not any(own):
        raise DataError(f"class={domains[0].classes[target]!r}: no domain has an image of it; name another class")
    names = [picture_names(domain) for domain in domains]
    at = [{each[p]: p for p in rows} for each, rows in zip(names, own, strict=True) if each is not None]
    held = Counter(name for positions in at for name in positions)
    if len(at) < len(domains) or max(held.values()) < 2:
        width = min(number, max(map(len, own)))
        return [[*rows[:width], *([None] * (width - len(rows)))] for rows in own]
    columns = [name for name, _ in held.most_common(number)]
    return [[positions.get(name) for name in columns] for positions in at]
