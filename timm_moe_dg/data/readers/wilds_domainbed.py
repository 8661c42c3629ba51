"""Camelyon17 and FMoW of WILDS in DomainBed's form: whole hospitals or regions as domains, without official splits.

Domains and images are in DomainBed's order, that of WILDS's tables, so that its splits carry over.

Camelyon17 (camelyon17_v1.0): metadata.csv (columns patient, node, x_coord, y_coord, tumor, center among others) and
patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png. Two classes. License: CC0.

FMoW (fmow_v1.1): see `wilds`. All images but the sequestered ones, of all years. DomainBed has six domains, the last of
which, "Other", has the few images without a region. Without it the splits of the five regions are the same, but runs
train on other images, so that its numbers are not comparable with DomainBed's. Domains know their images' coordinates.
License: FMoW Challenge Public License.
"""

import os
from collections.abc import Sequence

import numpy as np

from ..domains import UNGROUPED, DataDir
from ..texts import Texts, take
from .columns import choice, number, parsed, read_csv
from .folders import FolderDomain
from .places import PlacesDomain
from .wilds import REGIONS, fmow_table, release_folder

CENTERS = tuple("01234")
HOSPITALS = tuple(f"hospital_{center}" for center in CENTERS)
SIX_REGIONS = (*REGIONS, UNGROUPED)
_TUMOR = ("normal", "tumor")


def read_camelyon(data_dir: DataDir) -> list[FolderDomain]:
    """Reads Camelyon17, one domain for each hospital.

    Args:
        data_dir: The folder camelyon17_v1.0, or its parent.

    Raises:
        DataError: Files or columns are missing, or fields are empty or wrong; lines are named.
    """
    root = release_folder(data_dir, "camelyon17_v1.0", "metadata.csv")
    table = root / "metadata.csv"
    rows = read_csv(table, ("patient", "node", "x_coord", "y_coord", "tumor", "center"))
    centers = np.array(parsed(table, rows, "center", choice(*CENTERS), "a hospital, 0 to 4"))
    targets = np.array(parsed(table, rows, "tumor", {"0": 0, "1": 1}.__getitem__, "0 or 1"))
    columns = [parsed(table, rows, name, number, "a number") for name in ("patient", "node", "x_coord", "y_coord")]
    folder = "patches/patient_{0}_node_{1}/patch_patient_{0}_node_{1}_x_{2}_y_{3}.png"
    paths = Texts(os.path.join(root, folder.format(*parts)) for parts in zip(*columns, strict=True))
    members = {name: np.flatnonzero(centers == center) for center, name in zip(CENTERS, HOSPITALS, strict=True)}
    return [FolderDomain(name, _TUMOR, targets[own], take(paths, own)) for name, own in members.items() if len(own)]


def read_fmow_by_region(data_dir: DataDir, domains: Sequence[str] = SIX_REGIONS) -> list[PlacesDomain]:
    """Reads FMoW, one domain for each region.

    Args:
        data_dir: The folder fmow_v1.1, or its parent.
        domains: The regions, in DomainBed's order; with or without "Other".

    Raises:
        DataError: Files or columns are missing, or fields are empty or wrong; lines are named.
    """
    places = fmow_table(data_dir)
    released = places.part != "seq"
    members = {region: np.flatnonzero(released & (places.group == region)) for region in domains}
    return [
        PlacesDomain(
            name=region,
            role="train",
            group=region,
            classes=places.classes,
            targets=places.targets[rows],
            images=take(places.images, rows),
            metadata=places.metadata[rows],
            split=None,
        )
        for region, rows in members.items()
        if len(rows)
    ]
