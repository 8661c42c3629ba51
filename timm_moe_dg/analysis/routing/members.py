"""Which patches of a run's images lie on which part: from sprites' part maps, or from CUB-200-2011's annotations."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...data import Domain, FolderDomain, SpritesDomain
from ...errors import ArgumentError, DataError
from ..run_view import RunView
from .cub import CubAnnotations, read_cub
from .parts import area_members, patch_centers, point_members

BACKGROUND = "background"


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
    at = known.rows_of([domain.paths[position] for position in rows])
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
