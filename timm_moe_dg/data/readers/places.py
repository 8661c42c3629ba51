"""Images with metadata (where, or by which camera) and an official split, as domains with a role.

A table of images becomes up to three kinds of domains. Training domains: the training images inside, their validation
images outside. "id" and "ood" domains are only evaluated, one per group and role: test images inside, outside what the
benchmark sets apart for validation under shift.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image

from ...errors import DataError
from ..splits import Split
from .folders import read_image

PARTS = ("train", "id_val", "id_test", "ood_val", "ood_test")
ROLES = {"train": ("train", "id_val"), "id": ("id_test", ""), "ood": ("ood_test", "ood_val")}  # inside, outside


@dataclass(frozen=True)
class Places:
    """A table of images, one entry per image in every column.

    Attributes:
        classes: Class names.
        images: File names, or grey images as uint8 arrays (height, width).
        targets: Class indices, int (N,).
        metadata: Longitude and latitude in degrees, float32 (N, 2), or location ids, int64 (N,).
        part: Names in `PARTS`, (N,); other rows belong to no split and are left out.
        group: Names of evaluation groups, such as regions, (N,).
    """

    classes: tuple[str, ...]
    images: Sequence[Any] = field(repr=False)
    targets: np.ndarray = field(repr=False)
    metadata: np.ndarray = field(repr=False)
    part: np.ndarray = field(repr=False)
    group: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class PlacesDomain:
    """One domain of a `Places` table.

    Attributes:
        name: Role and group, such as "id Europe".
        role: "train", "id" or "ood".
        group: The group's name; "all" where groups are pooled.
        classes: Class names.
        targets: One class index per image.
        images: As in `Places`.
        metadata: As in `Places`.
        split: The official one; None leaves it to `split_domains`.
    """

    name: str
    role: str
    group: str
    classes: tuple[str, ...]
    targets: Sequence[int] = field(repr=False)
    images: Sequence[Any] = field(repr=False)
    metadata: np.ndarray = field(repr=False)
    split: Split | None = field(repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The file cannot be decoded.
        """
        image = self.images[index]
        return Image.fromarray(image).convert("RGB") if isinstance(image, np.ndarray) else read_image(image)

    def without(self, positions: Collection[int]) -> "PlacesDomain":
        """Returns this domain without the images at some positions; an official split keeps the others."""
        kept = np.array([position for position in range(len(self)) if position not in positions], dtype=int)
        return replace(
            self,
            targets=[self.targets[position] for position in kept],
            images=[self.images[position] for position in kept],
            metadata=self.metadata[kept],
            split=self.split and Split(*(_renumbered(part, kept) for part in (self.split.inside, self.split.outside))),
        )


def domains_of(places: Places, pooled: bool = False) -> list[PlacesDomain]:
    """Divides a table into domains: training domains first, then "id", then "ood", groups in alphabetical order.

    Args:
        places: The table.
        pooled: Train on all groups as one domain; otherwise each training step draws equally from every group.

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
    for role, (inside, outside) in ROLES.items():
        groups = ["all"] if role == "train" and pooled else sorted(set(places.group[places.part == inside]))
        domains += [_domain(places, role, group, inside, outside) for group in groups]
    return domains


def _domain(places: Places, role: str, group: str, inside: str, outside: str) -> PlacesDomain:
    member = np.ones(len(places.group), dtype=bool) if group == "all" else places.group == group
    tested, held = (np.flatnonzero(member & (places.part == part)) for part in (inside, outside))
    rows, first = np.concatenate([tested, held]), len(tested)
    return PlacesDomain(
        name=role if group == "all" else f"{role} {group}",
        role=role,
        group=group,
        classes=places.classes,
        targets=places.targets[rows].tolist(),
        images=[places.images[row] for row in rows],
        metadata=places.metadata[rows],
        split=Split(np.arange(first), np.arange(first, len(rows))),
    )


def _renumbered(part: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Positions of a part's members among those that are kept."""
    return np.searchsorted(kept, part[np.isin(part, kept)])
