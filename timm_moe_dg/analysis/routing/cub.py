"""Annotations of CUB-200-2011: where 15 parts of each bird are, its bounding box, and its 312 attributes.

Format: text files of numbered rows below the folder CUB_200_2011, whose images lie in images/CLASS/IMAGE.
Source: C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011; for research and teaching only. Nothing is
downloaded. The copies of a photograph in other styles (CUB-DG) are found under the same CLASS/IMAGE.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import DataError
from .pictures import picture_key

FILES = ("images.txt", "bounding_boxes.txt", "parts/parts.txt", "parts/part_locs.txt")
LABELS = "attributes/image_attribute_labels.txt"
NAMES = ("attributes/attributes.txt", "attributes.txt")  # where copies of the data set have it


@dataclass(frozen=True)
class CubAnnotations:
    """What is known about each photograph, N of them, in the order of images.txt.

    Attributes:
        images: Position by CLASS/IMAGE without the extension.
        parts: Names of the parts, P.
        points: (N, P, 2) x and y of each part in pixels of the photograph.
        visible: bool (N, P).
        boxes: (N, 4) left, top, width and height of the bird, likewise.
        attributes: bool (N, A); None where the copy has no attributes.
        attribute_names: GROUP::VALUE for each.
    """

    images: dict[str, int]
    parts: tuple[str, ...]
    points: Tensor
    visible: Tensor
    boxes: Tensor
    attributes: Tensor | None
    attribute_names: tuple[str, ...]

    def rows_of(self, paths: Sequence[str]) -> list[int]:
        """Positions of image files, -1 for those that are not of this data set."""
        return [self.images.get(picture_key(path), -1) for path in paths]


def read_cub(folder: str | os.PathLike[str]) -> CubAnnotations:
    """Reads the annotations.

    Args:
        folder: CUB_200_2011, or the folder that holds it.

    Raises:
        DataError: A file is missing, or a row of it cannot be read; the message names both.
    """
    root = _root(Path(folder))
    ids, paths = zip(*((row[0], row[1]) for row in _rows(root / FILES[0], 2)), strict=True)
    at = {name: position for position, name in enumerate(ids)}
    parts = {row[0]: " ".join(row[1:]) for row in _rows(root / FILES[2], 2)}
    points, visible = _points(root / FILES[3], at, {name: position for position, name in enumerate(parts)})
    boxes = torch.zeros(len(at), 4)
    for number, row in enumerate(_rows(root / FILES[1], 5), 1):
        boxes[_known(at, row[0], root / FILES[1], number)] = _numbers(row[1:5], root / FILES[1], number)
    attributes, names = _attributes(root, at)
    images = {picture_key(path): position for position, path in enumerate(paths)}
    return CubAnnotations(images, tuple(parts.values()), points, visible, boxes, attributes, names)


def _root(folder: Path) -> Path:
    root = folder / "CUB_200_2011" if (folder / "CUB_200_2011").is_dir() else folder
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        remedy = "give the folder CUB_200_2011 of the original release, with its parts"
        raise DataError(f"cub={str(folder)!r}: lacks {', '.join(missing)}; {remedy}")
    return root


def _rows(path: Path, fields: int) -> Iterator[list[str]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            row = line.split()
            if row and len(row) < fields:
                raise DataError(f"{str(path)!r}, line {number}: {line.strip()!r} has fewer than {fields} fields")
            if row:
                yield row


def _numbers(row: Sequence[str], path: Path, number: int) -> Tensor:
    try:
        return torch.tensor([float(field) for field in row])
    except ValueError as error:
        raise DataError(f"{str(path)!r}, line {number}: {error}; give numbers") from error


def _known(positions: dict[str, int], name: str, path: Path, number: int) -> int:
    if name not in positions:
        raise DataError(f"{str(path)!r}, line {number}: {name!r} is no known number; complete the copy")
    return positions[name]


def _points(path: Path, images: dict[str, int], parts: dict[str, int]) -> tuple[Tensor, Tensor]:
    points, visible = torch.zeros(len(images), len(parts), 2), torch.zeros(len(images), len(parts), dtype=torch.bool)
    for number, row in enumerate(_rows(path, 5), 1):
        at = _known(images, row[0], path, number), _known(parts, row[1], path, number)
        x, y, seen = _numbers(row[2:5], path, number)
        points[at], visible[at] = torch.stack([x, y]), bool(seen)
    return points, visible


def _attributes(root: Path, images: dict[str, int]) -> tuple[Tensor | None, tuple[str, ...]]:
    """Rows are IMAGE ATTRIBUTE PRESENT and more: some rows of the release have a field too many after these."""
    table = next((root / name for name in NAMES if (root / name).is_file()), None)
    table = table or next((root.parent / name for name in NAMES if (root.parent / name).is_file()), None)
    if table is None or not (root / LABELS).is_file():
        return None, ()
    names = {row[0]: " ".join(row[1:]) for row in _rows(table, 2)}
    at = {name: position for position, name in enumerate(names)}
    labels = torch.zeros(len(images), len(names), dtype=torch.bool)
    for number, row in enumerate(_rows(root / LABELS, 3), 1):
        cell = _known(images, row[0], root / LABELS, number), _known(at, row[1], root / LABELS, number)
        labels[cell] = row[2] == "1"
    return labels, tuple(names.values())
