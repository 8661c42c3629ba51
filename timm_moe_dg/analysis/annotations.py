"""Parts and attributes of a run's images by patch, from the domains' part maps or the annotations of CUB-200-2011.

CUB-200-2011 annotates each bird with the places of 15 parts, a bounding box and 312 attributes.
Format: text files of numbered rows in the folder CUB_200_2011, whose images lie in images/CLASS/IMAGE.
Source: C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011; for research and teaching only. Nothing is
downloaded. The copies of a photograph in other styles (CUB-DG) have the same CLASS/IMAGE.

Axes: B images, N = H * W patches in rows from the top left, P parts, A attributes.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import Domain, FolderDomain
from ..errors import ArgumentError, DataError
from .run_view import RunView, picture_key, picture_names

BACKGROUND = "background"
NUM_NEAREST = 9  # patches counted for a part that is a point, as in GMoE (Li et al., ICLR 2023), figure 3b
IMAGES, BOXES, PARTS, POINTS = "images.txt", "bounding_boxes.txt", "parts/parts.txt", "parts/part_locs.txt"
ATTRIBUTE_LABELS = "attributes/image_attribute_labels.txt"
ATTRIBUTE_NAMES = ("attributes/attributes.txt", "attributes.txt", "../attributes.txt")  # the copies differ


@runtime_checkable
class PartMaps(Protocol):
    """The attributes of a `Domain` of your own whose patches are annotated, as in examples/sprites.py."""

    part_maps: np.ndarray  # integers (B, height, width) of all images, the part of each pixel
    part_names: tuple[str, ...]  # P names
    attributes: np.ndarray  # bool (B, A)
    attribute_names: tuple[str, ...]  # A names, GROUP::VALUE


class AnnotatedDomain(NamedTuple):
    """The annotated images of one domain."""

    domain: Domain
    positions: list[int]  # of the B images in the domain
    pictures: list[str]  # B names, which the images of one picture in several domains share
    members: Tensor  # bool (B, P, N), whether a patch counts for a part
    parts: tuple[str, ...]  # P names
    attributes: Tensor | None  # bool (B, A); None if unknown
    attribute_names: tuple[str, ...]  # A names, GROUP::VALUE


class CubAnnotations(NamedTuple):
    """The annotations of all photographs, in the order of images.txt."""

    images: dict[str, int]  # CLASS/IMAGE without the extension -> row
    parts: tuple[str, ...]  # P names
    points: Tensor  # (B, P, 2) x and y of each part in pixels of the photograph
    visible: Tensor  # bool (B, P)
    boxes: Tensor  # (B, 4) left, top, width and height of the bird, in pixels of the photograph
    attributes: Tensor | None  # bool (B, A); None if the copy of the data set has no attributes
    attribute_names: tuple[str, ...]  # A names, GROUP::VALUE


def annotate(
    view: RunView, images: Sequence[Sequence[int]], grid: tuple[int, int], cub: Path | None
) -> list[AnnotatedDomain]:
    """Annotates images of every domain, by position, on H x W patches, from `cub` or else from part maps."""
    domains = view.domains
    if cub is not None:
        annotations = read_cub(cub)
        annotated = [
            _from_cub(view, domain, positions, grid, annotations)
            for domain, positions in zip(domains, images, strict=True)
            if isinstance(domain, FolderDomain)
        ]
        if not any(domain.positions for domain in annotated):
            remedy = f"has none of the images of {view.args['dataset']}, by CLASS/IMAGE; give the photographs' folder"
            raise DataError(f"cub={str(cub)!r}: {remedy}")
        return [domain for domain in annotated if domain.positions]
    if not all(isinstance(domain, PartMaps) for domain in domains):
        remedy = f"{view.args['dataset']} has no part maps; give --cub CUB_200_2011 for its photographs"
        raise ArgumentError.of("cub", None, remedy)
    return [_from_part_maps(view, domain, list(rows), grid) for domain, rows in zip(domains, images, strict=True)]


def patch_centers(grid: tuple[int, int], size: tuple[float, float]) -> Tensor:
    """Centers (N, 2), x and y, of a grid (H, W) of patches over an image of size (height, width)."""
    y, x = ((torch.arange(cells) + 0.5) * (side / cells) for cells, side in zip(grid, size, strict=True))
    return torch.cartesian_prod(y, x).flip(-1).view(-1, 2)


def point_members(points: Tensor, visible: Tensor, box: Tensor, centers: Tensor) -> Tensor:
    """Assigns patches to parts that are points, the nearest nine to each, and to the background outside of the box.

    Coordinates are in pixels of the model's input: points (B, P, 2) x and y, boxes (B, 4) left, top, width and height,
    centers (N, 2). The result is bool (B, P + 1, N), the background last. A patch can count for several parts.
    """
    squares = (points[..., None, :].double() - centers.double()).square().sum(-1)
    # A stable sort: of equally near patches, the lower index comes first
    nearest = squares.sort(dim=-1, stable=True).indices[..., :NUM_NEAREST]
    parts = torch.zeros(squares.shape, dtype=torch.bool).scatter(-1, nearest, True)
    corner, size = box[:, None, :2], box[:, None, 2:]
    outside = ((centers < corner) | (centers > corner + size)).any(-1)
    return torch.cat([parts & visible[..., None], outside[:, None]], dim=1)


def area_members(part_maps: Tensor, num_parts: int, grid: tuple[int, int]) -> Tensor:
    """Assigns each patch to the part that most of its pixels belong to, the lower index in a tie: bool (B, P, N).

    `part_maps` int64 (B, height, width) hold the part of each pixel. The patches of a grid (H, W) cover them.
    """
    # The mean over a patch of one-hot pixels is the share of each part
    pixels = F.one_hot(part_maps, num_parts).permute(0, 3, 1, 2).float()
    counts = F.adaptive_avg_pool2d(pixels, grid)
    return F.one_hot(counts.argmax(1).flatten(1), num_parts).transpose(1, 2).bool()


def _from_part_maps(view: RunView, domain: Any, positions: list[int], grid: tuple[int, int]) -> AnnotatedDomain:
    members = area_members(torch.as_tensor(domain.part_maps[positions]).long(), len(domain.part_names), grid)
    attributes = torch.as_tensor(domain.attributes[positions])
    # Without names of pictures, no other domain has the same picture
    names = picture_names(domain, view.shares_photographs) or [f"{domain.name}/{i}" for i in range(len(domain))]
    pictures = [names[index] for index in positions]
    return AnnotatedDomain(domain, positions, pictures, members, domain.part_names, attributes, domain.attribute_names)


def _from_cub(
    view: RunView, domain: FolderDomain, candidates: Sequence[int], grid: tuple[int, int], annotations: CubAnnotations
) -> AnnotatedDomain:
    keys = {index: picture_key(domain.file(index)) for index in candidates}
    positions = [index for index in candidates if keys[index] in annotations.images]
    rows = [annotations.images[keys[index]] for index in positions]
    # The network's transform resizes both axes independently, so each has a scale of its own
    sizes = torch.tensor([domain.image(index).size for index in positions]).view(-1, 2)
    scale = torch.tensor([view.size[1], view.size[0]]) / sizes
    points = annotations.points[rows] * scale[:, None]
    boxes = annotations.boxes[rows] * scale.repeat(1, 2)
    members = point_members(points, annotations.visible[rows], boxes, patch_centers(grid, view.size))
    attributes = None if annotations.attributes is None else annotations.attributes[rows]
    parts = (*annotations.parts, BACKGROUND)
    pictures = [keys[index] for index in positions]
    return AnnotatedDomain(domain, positions, pictures, members, parts, attributes, annotations.attribute_names)


def read_cub(folder: str | os.PathLike[str]) -> CubAnnotations:
    """Reads the annotations in CUB_200_2011, or in the folder that contains it. Errors name the file and the row."""
    folder = Path(folder)
    root = folder / "CUB_200_2011" if (folder / "CUB_200_2011").is_dir() else folder
    if missing := [name for name in (IMAGES, BOXES, PARTS, POINTS) if not (root / name).is_file()]:
        remedy = "give the folder CUB_200_2011 of the original release, with its parts"
        raise DataError(f"cub={str(folder)!r}: lacks {', '.join(missing)}; {remedy}")
    images, parts = _names(root / IMAGES), _names(root / PARTS)
    (image, part), values = _numbers(root / POINTS, images, parts, columns=3)
    points, visible = torch.zeros(len(images), len(parts), 2), torch.zeros(len(images), len(parts), dtype=torch.bool)
    points[image, part], visible[image, part] = values[:, :2], values[:, 2] != 0
    (image,), values = _numbers(root / BOXES, images, columns=4)
    boxes = torch.zeros(len(images), 4)
    boxes[image] = values
    rows = {picture_key(path): index for index, path in enumerate(images.values())}
    return CubAnnotations(rows, tuple(parts.values()), points, visible, boxes, *_read_attributes(root, images))


def _read_attributes(root: Path, images: dict[int, str]) -> tuple[Tensor | None, tuple[str, ...]]:
    path = root / ATTRIBUTE_LABELS
    table = next((root / name for name in ATTRIBUTE_NAMES if (root / name).is_file()), None)
    if table is None or not path.is_file():
        return None, ()
    names = _names(table)
    labels = torch.zeros(len(images), len(names), dtype=torch.bool)
    # IMAGE ATTRIBUTE PRESENT, then certainty and time, where some lines of the release have a field too many
    (image, attribute), present = _numbers(path, images, names, columns=1)
    labels[image, attribute] = present[:, 0] == 1
    return labels, tuple(names.values())


def _names(path: Path) -> dict[int, str]:
    """Number -> name of each line."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
    try:
        return {int(number): name.strip() for number, name in lines}
    except ValueError as error:
        raise DataError(f"{str(path)!r}: {error}; give a number and a name in each line") from error


def _numbers(path: Path, *tables: dict[int, str], columns: int) -> tuple[list[Tensor], Tensor]:
    """The lines' positions in each of the tables whose numbers come first, and the columns that follow these."""
    try:
        values = np.loadtxt(path, comments=None, usecols=range(len(tables) + columns), ndmin=2)
        index_of = [{number: index for index, number in enumerate(table)} for table in tables]
        positions = [[index[number] for number in column] for index, column in zip(index_of, values.T, strict=False)]
    except (ValueError, KeyError) as error:
        is_unknown = isinstance(error, KeyError)
        reason = f"no image, part or attribute has the number {error.args[0]:g}" if is_unknown else error
        raise DataError(f"{str(path)!r}: {reason}; repair or complete the copy") from error
    following = torch.tensor(values[:, len(tables) :], dtype=torch.float32)
    return [torch.tensor(column, dtype=torch.long) for column in positions], following
