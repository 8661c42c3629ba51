"""Parts and attributes of a run's images, from sprites' part maps or from the annotations of CUB-200-2011.

CUB-200-2011 annotates each bird with the places of 15 parts, a bounding box and 312 attributes.
Format: text files of numbered rows below the folder CUB_200_2011, whose images lie in images/CLASS/IMAGE.
Source: C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011; for research and teaching only. Nothing is
downloaded. The copies of a photograph in other styles (CUB-DG) are found by the same CLASS/IMAGE.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...data import Domain, FolderDomain, SpritesDomain
from ...errors import ArgumentError, DataError
from ..run_view import RunView
from .chosen_images import picture_key
from .parts import area_members, patch_centers, point_members

BACKGROUND = "background"
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


class Annotated(NamedTuple):
    """The annotated images of one domain.

    Attributes:
        domain: It.
        positions: Of the images in it, B of them.
        members: bool (B, P, N) whether a patch counts for a part.
        parts: P names.
        attributes: bool (B, A) of the images; None where they are not known.
        attribute_names: A names, GROUP::VALUE.
    """

    domain: Domain
    positions: list[int]
    members: Tensor
    parts: tuple[str, ...]
    attributes: Tensor | None
    attribute_names: tuple[str, ...]


def annotated(
    view: RunView, domains: Sequence[Domain], grid: tuple[int, int], cub: Path | None, max_images: int | None
) -> list[Annotated]:
    """Finds parts and attributes of the images of every domain.

    Args:
        view: The run, whose input's size and whose data count.
        domains: Of the run's data.
        grid: Patches down and across.
        cub: Folder of CUB-200-2011; None for data that knows its parts itself.
        max_images: Of each domain, the first ones; None for all.

    Raises:
        ArgumentError: The data does not know its parts, and no folder says them.
        DataError: The folder lacks annotations, or has none of the run's images.
    """
    counts = [range(len(domain))[:max_images] for domain in domains]
    if cub is not None:
        known = read_cub(cub)
        found = [
            _from_cub(view, each, rows, grid, known)
            for each, rows in zip(domains, counts, strict=True)
            if isinstance(each, FolderDomain)
        ]
        if not any(each.positions for each in found):
            remedy = f"no image of the run's data ({view.args['dataset']}) is one of its images, by CLASS/IMAGE"
            raise DataError(f"cub={str(cub)!r}: {remedy}")
        return [each for each in found if each.positions]
    drawn = [domain for domain in domains if isinstance(domain, SpritesDomain)]
    if len(drawn) < len(domains):
        remedy = f"{view.args['dataset']} does not say where parts are; give --cub CUB_200_2011 for its photographs"
        raise ArgumentError.of("cub", None, remedy)
    return [_from_maps(each, list(rows), grid) for each, rows in zip(drawn, counts, strict=True)]


def _from_maps(domain: SpritesDomain, positions: list[int], grid: tuple[int, int]) -> Annotated:
    maps = torch.as_tensor(domain.part_maps[positions])
    members = area_members(maps, len(domain.part_names), grid)
    attributes = torch.as_tensor(domain.attributes[positions])
    return Annotated(domain, positions, members, domain.part_names, attributes, domain.attribute_names)


def _from_cub(
    view: RunView, domain: FolderDomain, rows: range, grid: tuple[int, int], known: CubAnnotations
) -> Annotated:
    at = known.rows_of([domain.file(position) for position in rows])
    positions = [position for position, row in zip(rows, at, strict=True) if row >= 0]
    kept = [row for row in at if row >= 0]
    scale = torch.tensor([_scale(domain.image(position).size, view.size) for position in positions]).view(-1, 2)
    points = known.points[kept] * scale[:, None]
    boxes = known.boxes[kept] * scale.repeat(1, 2)
    members = point_members(points, known.visible[kept], boxes, patch_centers(grid, view.size))
    attributes = None if known.attributes is None else known.attributes[kept]
    return Annotated(domain, positions, members, (*known.parts, BACKGROUND), attributes, known.attribute_names)


def _scale(size: tuple[int, int], target: tuple[int, int]) -> tuple[float, float]:
    """Across and down, from a photograph (width, height) squeezed to (height, width) pixels."""
    return target[1] / size[0], target[0] / size[1]
