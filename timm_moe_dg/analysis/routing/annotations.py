"""Parts and attributes of a run's images, from sprites' part maps or from the annotations of CUB-200-2011.

CUB-200-2011 annotates each bird with the places of 15 parts, a bounding box and 312 attributes.
Format: text files of numbered rows in the folder CUB_200_2011, whose images lie in images/CLASS/IMAGE.
Source: C. Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, 2011; for research and teaching only. Nothing is
downloaded. The copies of a photograph in other styles (CUB-DG) have the same CLASS/IMAGE.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...data import Domain, FolderDomain, SpritesDomain
from ...errors import ArgumentError, DataError, did_you_mean
from ..run_view import RunView
from .chosen_images import ImageRows, picture_key
from .map_plots import Places
from .parts import area_members, patch_centers, point_members

BACKGROUND = "background"
IMAGES, BOXES, PARTS, POINTS = "images.txt", "bounding_boxes.txt", "parts/parts.txt", "parts/part_locs.txt"
ATTRIBUTE_LABELS = "attributes/image_attribute_labels.txt"
ATTRIBUTE_NAMES = ("attributes/attributes.txt", "attributes.txt", "../attributes.txt")  # the copies differ


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
    """The annotations of N photographs, in the order of images.txt."""

    images: dict[str, int]  # CLASS/IMAGE without the extension -> row
    parts: tuple[str, ...]  # P names
    points: Tensor  # (N, P, 2) x and y of each part in pixels of the photograph
    visible: Tensor  # bool (N, P)
    boxes: Tensor  # (N, 4) left, top, width and height of the bird, in pixels of the photograph
    attributes: Tensor | None  # bool (N, A); None if the copy of the data set has no attributes
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
    sprites = [domain for domain in domains if isinstance(domain, SpritesDomain)]
    if len(sprites) < len(domains):
        remedy = f"{view.args['dataset']} has no part maps; give --cub CUB_200_2011 for its photographs"
        raise ArgumentError.of("cub", None, remedy)
    return [_from_part_maps(domain, list(rows), grid) for domain, rows in zip(sprites, images, strict=True)]


def places_of_parts(
    view: RunView, rows: ImageRows, names: Sequence[str], grid: tuple[int, int], cub: Path | None
) -> list[Places]:
    """Places of named parts in the images of the rows, which are domains. An image without annotations has none."""
    images = [[image.position for image in row if image is not None and image.position is not None] for _, row in rows]
    places: dict[str, dict[int, Places]] = {}
    for part in annotate(view, images, grid, cub):
        places[part.domain.name] = dict(zip(part.positions, middles(part, names, grid), strict=True))
    pairs = zip(rows, images, strict=True)
    return [places.get(name, {}).get(position, {}) for (name, _), row in pairs for position in row]


def middles(annotated: AnnotatedDomain, names: Sequence[str], grid: tuple[int, int]) -> list[Places]:
    """For each image, the middle of the patches of each part. Parts that cannot be seen are left out."""
    for name in names:
        if name not in annotated.parts:
            remedy = did_you_mean(name, annotated.parts) or f"choose from {', '.join(annotated.parts)}"
            raise ArgumentError.of("parts", name, f"no such part; {remedy}")
    members = annotated.members[:, [annotated.parts.index(name) for name in names]].float()
    counts = members.sum(-1)
    middles = (members @ patch_centers(grid, (1, 1)) / counts.unsqueeze(-1)).tolist()
    return [
        {name: (x, y) for name, (x, y), count in zip(names, places, row, strict=True) if count}
        for places, row in zip(middles, counts.tolist(), strict=True)
    ]


def _from_part_maps(domain: SpritesDomain, positions: list[int], grid: tuple[int, int]) -> AnnotatedDomain:
    members = area_members(torch.as_tensor(domain.part_maps[positions]), len(domain.part_names), grid)
    attributes = torch.as_tensor(domain.attributes[positions])
    pictures = [domain.file(index) for index in positions]
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
    """Reads the annotations in CUB_200_2011, or in the folder that contains it. Errors name the file and the line."""
    folder = Path(folder)
    root = folder / "CUB_200_2011" if (folder / "CUB_200_2011").is_dir() else folder
    if missing := [name for name in (IMAGES, BOXES, PARTS, POINTS) if not (root / name).is_file()]:
        remedy = "give the folder CUB_200_2011 of the original release, with its parts"
        raise DataError(f"cub={str(folder)!r}: lacks {', '.join(missing)}; {remedy}")
    images, parts = _names(root / IMAGES), _names(root / PARTS)
    index_of, part_of = ({number: index for index, number in enumerate(names)} for names in (images, parts))
    points, visible = torch.zeros(len(images), len(parts), 2), torch.zeros(len(images), len(parts), dtype=torch.bool)
    for image, part, x, y, is_visible in _numbers(root / POINTS, 5, index_of, part_of):
        points[image, part], visible[image, part] = torch.tensor([x, y]), bool(is_visible)
    boxes = torch.zeros(len(images), 4)
    for image, *box in _numbers(root / BOXES, 5, index_of):
        boxes[image] = torch.tensor(box)
    attributes, attribute_names = _read_attributes(root, index_of)
    rows = {picture_key(path): index for index, path in enumerate(images.values())}
    return CubAnnotations(rows, tuple(parts.values()), points, visible, boxes, attributes, attribute_names)


def _lines(path: Path, fields: int) -> Iterator[tuple[str, list[str]]]:
    """The place of each line that is not empty, for messages, and its fields."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            row, place = line.split(), f"{str(path)!r}, line {number}"
            if row and len(row) < fields:
                raise DataError(f"{place}: {line.strip()!r} has fewer than {fields} fields")
            if row:
                yield place, row


def _names(path: Path) -> dict[str, str]:
    return {row[0]: " ".join(row[1:]) for _, row in _lines(path, 2)}


def _numbers(path: Path, fields: int, *index_of: Mapping[str, int]) -> Iterator[list[Any]]:
    """The first fields of each line: one position from each table in `index_of`, then numbers."""
    for place, row in _lines(path, fields):
        try:
            positions = [table[name] for table, name in zip(index_of, row, strict=False)]
            yield [*positions, *map(float, row[len(positions) : fields])]
        except KeyError as error:
            raise DataError(f"{place}: no image or part has the number {error}; complete the copy") from error
        except ValueError as error:
            raise DataError(f"{place}: {error}; give numbers") from error


def _read_attributes(root: Path, images: dict[str, int]) -> tuple[Tensor | None, tuple[str, ...]]:
    path = root / ATTRIBUTE_LABELS
    table = next((root / name for name in ATTRIBUTE_NAMES if (root / name).is_file()), None)
    if table is None or not path.is_file():
        return None, ()
    names = _names(table)
    labels = torch.zeros(len(images), len(names), dtype=torch.bool)
    # IMAGE ATTRIBUTE PRESENT, then certainty and time, where some lines of the release have a field too many
    for image, attribute, present in _numbers(path, 3, images, {number: index for index, number in enumerate(names)}):
        labels[image, attribute] = present == 1
    return labels, tuple(names.values())
