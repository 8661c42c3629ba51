"""Which images of a run are drawn, and what the network makes of them."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...data import Domain
from ...data.bands import as_picture
from ...data.pixels import Pixels
from ...data.readers import find_images, read_pixels
from ...errors import ArgumentError
from ..run_view import RunView
from .map_plots import Photograph, Rows
from .pictures import choose_pictures, class_index, picture_names

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
