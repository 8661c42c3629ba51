"""Images with metadata (where, or by which camera) and an official split, as domains with a role.

A table of images becomes up to three kinds of domains. Training domains: the training images inside, their validation
images outside. "id" and "ood" domains are only evaluated, one per group and role: test images inside, outside what the
benchmark sets apart for validation under shift.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from PIL import Image

from ...errors import DataError
from ..domains import Domain, Split
from ..texts import take
from .images import read_picture

PARTS = ("train", "id_val", "id_test", "ood_val", "ood_test")
PARTS_OF_ROLES = {
    "train": ("train", "id_val"),
    "id": ("id_test", ""),
    "ood": ("ood_test", "ood_val"),
}  # inside, outside
POOLED = "all"  # the group of domains in which groups are pooled

PathOrPixels: TypeAlias = str | np.ndarray


@dataclass(frozen=True, eq=False)
class Places:
    """A table of images, one entry per image in every column; its arrays cannot be written to.

    Attributes:
        classes: Class names.
        images: File names, or gray images as uint8 arrays (height, width).
        targets: Class indices, int (N,).
        metadata: Longitude and latitude in degrees, and further numbers if any, float32 (N, 2 or more), or location
            ids, int64 (N,).
        part: Names in `PARTS`, (N,); other rows belong to no split and are left out.
        group: Names of evaluation groups, such as regions, (N,).
    """

    classes: tuple[str, ...]
    images: Sequence[PathOrPixels] = field(repr=False)
    targets: np.ndarray = field(repr=False)
    metadata: np.ndarray = field(repr=False)
    part: np.ndarray = field(repr=False)
    group: np.ndarray = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("targets", "metadata", "part", "group"):
            column = vars(self)[name].view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)


@dataclass(frozen=True, eq=False)
class PlacesDomain(Domain[PathOrPixels]):
    """One domain of a `Places` table, with its images and metadata; named by role and group, such as "id Europe"."""

    metadata: np.ndarray = field(kw_only=True, repr=False)

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The file cannot be decoded.
        """
        image = self.images[index]
        return (
            Image.fromarray(image).convert("RGB") if isinstance(image, np.ndarray) else read_picture(image, self.bands)
        )


def domains_of(places: Places, pooled: bool = False, training: np.ndarray | None = None) -> list[PlacesDomain]:
    """Divides a table into domains: training domains first, then "id", then "ood", groups in alphabetical order.

    Args:
        places: The table.
        pooled: Train on all groups as one domain; otherwise each training step draws equally from every group.
        training: Names of the training domains, (N,), where these are not the groups, such as camera traps. Those
            without validation images have an empty "out" part.

    Raises:
        DataError: Nothing to train on, nothing to validate on, or nothing to test on.
    """
    counts = {part: int((places.part == part).sum()) for part in PARTS}
    lacking = [name for name in ("train", "id_val") if not counts[name]]
    if lacking or not counts["id_test"] + counts["ood_test"]:
        raise DataError(
            f"split={counts}: needs images in train, in id_val, and in id_test or ood_test; check the split column"
        )
    domains = []
    for role, (inside, outside) in PARTS_OF_ROLES.items():
        if role == "train" and pooled:
            members = {POOLED: np.ones(len(places.part), dtype=bool)}
        else:
            names = training if role == "train" and training is not None else places.group
            members = {name: names == name for name in sorted(set(names[places.part == inside]))}
        domains += [_domain(places, role, group, member, inside, outside) for group, member in members.items()]
    return domains


def _domain(places: Places, role: str, group: str, member: np.ndarray, inside: str, outside: str) -> PlacesDomain:
    tested, held = (np.flatnonzero(member & (places.part == part)) for part in (inside, outside))
    rows, first = np.concatenate([tested, held]), len(tested)
    return PlacesDomain(
        name=role if group == POOLED else f"{role} {group}",
        role=role,
        group=group,
        classes=places.classes,
        targets=places.targets[rows],
        images=take(places.images, rows),
        metadata=places.metadata[rows],
        split=Split(np.arange(first), np.arange(first, len(rows))),
    )
