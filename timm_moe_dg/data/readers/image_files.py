"""Images without labels: found by file, folder or pattern, read in order, with their metadata if a table gives any."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...errors import DataError, ImageReadError
from ..pixels import IMAGE_EXTENSIONS, RGB, Transform
from ..texts import Texts
from .columns import coordinates, field, numeric, parsed, read_csv
from .images import images_below, read_pixels

Sample: TypeAlias = tuple[int, Tensor, *tuple[Tensor, ...]]  # position, image (C, H, W), and metadata if there are any


def find_images(sources: Sequence[str]) -> list[str]:
    """Lists image files in the order of the sources, within each in the order of their paths, every file once.

    Args:
        sources: Files, whatever their extension; folders, searched to any depth for torchvision's image extensions;
            patterns with *, ? and **.

    Raises:
        DataError: A source gives no file, or a folder cannot be listed or is a link below another.
    """
    found: dict[str, str] = {}
    for source in sources:
        paths = [source] if os.path.isfile(source) else _below(source)
        if not paths:
            raise DataError(f"images={source!r}: no such file, or no image below or matching it ({IMAGE_EXTENSIONS})")
        for path in paths:
            found.setdefault(os.path.abspath(path), path)
    return list(found.values())


def read_metadata(table: Path, paths: Sequence[str], ids: bool = False, columns: Sequence[str] = ()) -> np.ndarray:
    """Looks up the metadata of images.

    Args:
        table: A csv file with columns path (below the table's folder, or absolute), and lon and lat in degrees ("nan"
            in both where unknown) or location.
        paths: Of the images.
        ids: Read `location`, a whole number, negative where unknown, instead of coordinates.
        columns: Further columns of numbers, such as a time or a sensor's; beside coordinates only.

    Returns:
        float32 (N, 2 + len(columns)) longitude, latitude and the further columns, or int64 (N,) ids; NaN or -1 for
        images that are not in the table.

    Raises:
        DataError: A column is missing, or a field is empty or wrong; lines are named.
    """
    rows = read_csv(table, ["path", "location"] if ids else ["path", "lon", "lat"])
    if ids:
        values = np.array(parsed(table, rows, "location", int, "a whole number"), dtype=np.int64)
    else:
        values = np.concatenate([coordinates(table, rows), numeric(table, rows, columns)], axis=1)
    files = (os.path.abspath(os.path.join(table.parent, path.strip())) for path in field(rows, "path"))
    places = dict(zip(files, values, strict=True))
    unknown = np.int64(-1) if ids else np.full(2 + len(columns), np.nan, dtype=np.float32)
    return np.stack([places.get(os.path.abspath(path), unknown) for path in paths])


class ImageFiles(Dataset):
    """Image files with their positions in the list, and their metadata.

    Args:
        paths: The files.
        transform: Applied to each image.
        metadata: (N, ...) one row per file, or None.
        skip_unreadable: Give None for a file that cannot be decoded, instead of raising `ImageReadError`.
        in_chans: Bands of each file; three are read as RGB.
    """

    def __init__(
        self,
        paths: Sequence[str],
        transform: Transform,
        metadata: np.ndarray | None = None,
        skip_unreadable: bool = False,
        in_chans: int = RGB,
    ) -> None:
        self.paths = Texts(paths)
        self.transform = transform
        self.metadata = metadata
        self.skip_unreadable = skip_unreadable
        self.in_chans = in_chans

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Sample | None:
        try:
            image = self.transform(read_pixels(self.paths[index], self.in_chans))
        except ImageReadError:
            if not self.skip_unreadable:
                raise
            return None
        return index, image, *(() if self.metadata is None else (torch.as_tensor(self.metadata[index]),))


def image_loader(images: ImageFiles, *, batch_size: int, workers: int) -> DataLoader:
    """Builds the loader, in the order of the files; yields lists of positions (B,), images (B, C, H, W), metadata.

    A batch lacks what was skipped; a batch of which nothing is left is an empty list.
    """
    return DataLoader(images, batch_size=batch_size, num_workers=workers, collate_fn=_collate)


def _below(source: str) -> list[str]:
    if os.path.isdir(source):
        return sorted(os.path.join(folder, name) for folder, names in images_below(source) for name in names)
    return sorted(path for path in glob.glob(source, recursive=True) if os.path.isfile(path))


def _collate(samples: Sequence[Sample | None]) -> list[Tensor]:
    columns = list(zip(*(sample for sample in samples if sample is not None), strict=True))
    return [torch.tensor(columns[0]), *map(torch.stack, columns[1:])] if columns else []
