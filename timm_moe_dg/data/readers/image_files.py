"""Images without labels, from files, folders or patterns, with metadata from a table."""

import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...errors import DataError, ImageReadError
from ..band_names import RGB, Bands
from ..bands import Transform
from ..domains import file_names
from .csv_tables import check_unique, coordinates, numeric, parsed, read_csv, slashes, whole_number
from .georeference import with_coordinates
from .images import describe_left_out, images_below, is_hidden, read_pixels, warn_if_squeezed

_LOGGER = logging.getLogger(__name__)
Sample: TypeAlias = tuple[int, Tensor, *tuple[Tensor, ...]]  # position, image (C, H, W), optionally metadata


def find_images(sources: Sequence[str]) -> list[str]:
    """Lists image files in the order of the sources, sorted by path within each, every file once.

    Sources are files with any extension, patterns with *, ? and **, or folders, in which files with an extension that
    Pillow reads are searched at any depth. The log counts the other files of folders.
    """
    files: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for source in sources:
        paths = [source] if os.path.isfile(source) else _files_of(source, left_out)
        if not paths:
            remark = f"; {describe_left_out(left_out)}" if left_out else ""
            raise DataError(f"images={source!r}: no such file, or no image below or matching it{remark}")
        for path in paths:
            files.setdefault(os.path.abspath(path), path)
    if left_out:
        _LOGGER.warning("images: %s", describe_left_out(left_out))
    return list(files.values())


def read_metadata(table: Path, paths: Sequence[str], ids: bool = False, columns: Sequence[str] = ()) -> np.ndarray:
    """Looks up the metadata of images in a csv table with a column path, relative to the table's folder or absolute.

    Its other columns are lon and lat in degrees ("nan" in both if unknown, empty to take them from GeoTIFFs) and the
    further numeric `columns`. With
    `ids` there is one column, location: an integer that is negative if unknown. The result is float32
    (N, 2 + len(columns)), longitude first, or int64 (N,) ids. Images that are not in the table have NaN or -1.
    """
    fields = read_csv(table, ["path", "location"] if ids else ["path"])
    folder, place = str(table.parent), cache(os.path.realpath)
    files = [_same_file(os.path.join(folder, slashes(path.strip(), folder)), place) for path in fields["path"]]
    check_unique(table, fields, "path", files)
    if ids:
        values = np.array(parsed(table, fields, "location", whole_number, "a whole number"), dtype=np.int64)
    else:
        fields = with_coordinates(table, fields, files)
        values = np.concatenate([coordinates(table, fields), numeric(table, fields, columns)], axis=1)
    metadata = dict(zip(files, values, strict=True))
    unknown = np.int64(-1) if ids else np.full(2 + len(columns), np.nan, dtype=np.float32)
    # Images may be links to the files of the table
    wanted = [path if path in metadata else os.path.realpath(path) for path in (_same_file(p, place) for p in paths)]
    if metadata.keys().isdisjoint(wanted):
        expected = f"such as {fields['path'][0]!r}, which is {files[0]!r}; the first image is {wanted[0]!r}"
        raise DataError(f"metadata={str(table)!r}: none of its {len(files)} paths is one of the images, {expected}")
    return np.stack([metadata.get(path, unknown) for path in wanted])


class ImageFiles(Dataset):
    """Image files read as `bands` (three: RGB), their positions in the list, and optionally `metadata` (N, ...).

    With `skip_unreadable`, a file that cannot be decoded gives None instead of `ImageReadError`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        transform: Transform,
        metadata: np.ndarray | None = None,
        skip_unreadable: bool = False,
        bands: Bands = RGB,
    ) -> None:
        self._files = file_names(paths)
        self.transform = transform
        self.metadata = metadata
        self.skip_unreadable = skip_unreadable
        self.bands = bands

    def __len__(self) -> int:
        return len(self._files)

    def path(self, index: int) -> str:
        """Returns the path of one image."""
        return os.fsdecode(self._files[index])

    def __getitem__(self, index: int) -> Sample | None:
        try:
            pixels = read_pixels(self.path(index), self.bands)
        except ImageReadError:
            if not self.skip_unreadable:
                raise
            return None
        image = self.transform(pixels)
        warn_if_squeezed(self.path(index), pixels, image)
        metadata = () if self.metadata is None else (torch.as_tensor(self.metadata[index]),)
        return index, image, *metadata


def image_loader(images: ImageFiles, *, batch_size: int, workers: int) -> DataLoader:
    """Builds the loader of positions (B,), images (B, C, H, W) and metadata. A batch of skipped images is empty."""
    return DataLoader(images, batch_size=batch_size, num_workers=workers, collate_fn=_collate)


def _files_of(source: str, left_out: Counter[str]) -> list[str]:
    if os.path.isdir(source):
        return sorted(os.path.join(folder, name) for folder, names in images_below(source, left_out) for name in names)
    named = set(Path(source).parts)
    paths = (path for path in glob.glob(source, recursive=True) if os.path.isfile(path))
    return sorted(path for path in paths if not any(map(is_hidden, set(Path(path).parts) - named - {".."})))


def _same_file(path: str, place: Callable[[str], str]) -> str:
    """A name that a file has however its path is spelled: by links to folders, ./ and .., or other forms of letters."""
    folder, name = os.path.split(path)
    return normalize("NFC", os.path.join(place(folder), name))


def _collate(samples: Sequence[Sample | None]) -> list[Tensor]:
    columns = list(zip(*(sample for sample in samples if sample is not None), strict=True))
    return [torch.tensor(columns[0]), *map(torch.stack, columns[1:])] if columns else []
