"""Images with metadata (coordinates or a camera's id) and an official split, as domains with a role.

Training domains validate on their "out" part. "id" and "ood" domains hold test images inside, one domain per group and
role, and outside what the benchmark reserves for validation under shift.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...errors import ArgumentError, DataError
from ..domains import DataDir, FileDomain, Split, check_spellings, file_names, given_folder, take
from .csv_tables import NAMES, below, choice, existing, name_parser, read_csv

PARTS = ("train", "id_val", "id_test", "ood_val", "ood_test")
# Inside and outside
PARTS_OF_ROLES = {"train": ("train", "id_val"), "id": ("id_test", ""), "ood": ("ood_test", "ood_val")}
POOLED = "all"  # the group of domains in which groups are pooled
COLUMNS = ("path", "label", "group")
ALL_COLUMNS = (*COLUMNS, "split", "lon", "lat")

FileOrPixels: TypeAlias = str | bytes | np.ndarray
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Places:
    """A table of images, one entry per image in every column.

    Attributes:
        classes: Class names.
        images: File names (see `file_names`), or gray images as uint8 arrays (height, width).
        targets: Class indices, int (N,).
        metadata: Longitude and latitude in degrees and optionally further numbers, float32 (N, 2 or more), or location
            ids, int64 (N,).
        part: Names in `PARTS`, (N,). Rows with another name belong to no split and are left out.
        group: Names of evaluation groups, such as regions, (N,).
    """

    classes: tuple[str, ...]
    images: Sequence[FileOrPixels] | np.ndarray = field(repr=False)
    targets: np.ndarray = field(repr=False)
    metadata: np.ndarray = field(repr=False)
    part: np.ndarray = field(repr=False)
    group: np.ndarray = field(repr=False)


@dataclass(frozen=True, eq=False)
class PlacesDomain(FileDomain[FileOrPixels]):
    """One domain of a `Places` table, named by role and group, such as "id Europe"."""

    metadata: np.ndarray = field(kw_only=True, repr=False)


def domains_of(
    places: Places, pooled: bool = False, training: np.ndarray | None = None, evaluating: bool = False
) -> list[PlacesDomain]:
    """Divides a table into domains: training domains first, then "id", then "ood", groups in alphabetical order.

    All groups are one training domain if `pooled`. Otherwise each training step draws equally from every group.
    `training` names other training domains, (N,), such as camera traps, whose "out" part may be empty. Data for
    `evaluating` a network alone may have any splits.
    """
    counts = {part: int((places.part == part).sum()) for part in PARTS}
    enough = counts["train"] and counts["id_val"] and counts["id_test"] + counts["ood_test"]
    if not (evaluating or enough):
        raise DataError(
            f"split={counts}: needs images in train, in id_val, and in id_test or ood_test; check the column of splits"
        )
    domains = []
    for role, (inside, outside) in PARTS_OF_ROLES.items():
        if role == "train" and pooled:
            members = {POOLED: np.ones(len(places.part), dtype=bool)}
        else:
            names = training if role == "train" and training is not None else places.group
            present = places.part == inside
            if role != "train" or evaluating:  # a group may have validation rows alone
                present |= places.part == outside
            elif untrained := _untrained(places, names).sum():
                _LOGGER.warning("%d rows of split %s are left out: their groups have no train row", untrained, outside)
            members = {name: names == name for name in sorted(set(names[present]))}
        domains += [_domain(places, role, group, member, inside, outside) for group, member in members.items()]
    return domains


def read_place_folder(
    data_dir: DataDir,
    metadata_columns: Sequence[str] = (),
    evaluating: bool = False,
    columns: Mapping[str, str] | None = None,
) -> list[PlacesDomain]:
    """Reads a folder of images with coordinates in its metadata.csv. Every training step draws equally from each group.

    Format: columns `path` (below the folder), `label`, `lon` and `lat` (degrees; nan in both if unknown), `split`
    (train, id_val, id_test, ood_val or ood_test) and `group` (such as a region; one name for all will do). Where
    `lon` and `lat` are empty or absent, GeoTIFFs have those of their centers, and photographs those of GPS tags.
    Classes: the labels in alphabetical order. Without a column `split`, the groups are domains to hold out in turn,
    and absent coordinates are unknown. `columns` gives the table's own names of these columns, and as `names` words
    such as NA that are no missing values. Numeric `metadata_columns`, such as a year, follow longitude and latitude
    in the metadata. A `DataError` names the lines of wrong fields. A group with id_val rows needs train rows, except
    in data for `evaluating` a network alone.
    """
    root = given_folder(data_dir, "metadata.csv and the images it names")
    columns, parse_name = dict(columns or {}), name_parser(columns)
    columns.pop(NAMES, None)
    if unknown := columns.keys() - set(ALL_COLUMNS):
        raise ArgumentError.of(
            "columns", columns, f"{min(unknown)} is none of {', '.join((*ALL_COLUMNS, NAMES))}; remove it"
        )
    required = [*(columns.get(name, name) for name in COLUMNS), *map(str, columns.values())]
    table = read_csv(root / "metadata.csv", required)
    table.names = {name: str(column) for name, column in columns.items()}
    table |= {name: table[column] for name, column in table.names.items()}
    paths = table.parsed("path", _existing(root), "an image below the folder")
    table.check_unique("path", paths)
    named = "words such as NA are missing values, unless --columns names=NA says otherwise"
    labels = table.parsed("label", parse_name, f"a label; {named}")
    groups = table.parsed("group", parse_name, f"the name of a group; {named}")
    is_split = "split" in table
    parts = ["train"] * len(paths)
    if is_split:
        parts = table.parsed("split", choice(*PARTS), f"one of {', '.join(PARTS)}")
    elif not {"lon", "lat"} & table.keys():  # a TIFF file of a microscope has no georeference
        table |= dict.fromkeys(("lon", "lat"), ["nan"] * len(paths))
    check_spellings(repr(str(table.path)), zip(labels, groups, strict=True))
    check_spellings(repr(str(table.path)), zip(groups, parts, strict=True), "groups")
    classes = tuple(sorted(set(labels)))
    places = Places(
        classes=classes,
        images=file_names(paths),
        targets=np.searchsorted(classes, labels),
        metadata=table.with_centers(paths).metadata(metadata_columns).astype(np.float32),
        part=np.array(parts),
        group=np.array(groups),
    )
    if not is_split:
        return [replace(domain, name=str(domain.group), split=None) for domain in domains_of(places, evaluating=True)]
    untrained = places.group[_untrained(places, places.group)]
    if len(untrained) and "train" in places.part and not evaluating:
        rows = f"{len(untrained)} rows of groups without a train row ({', '.join(sorted(set(untrained)))})"
        remedy = "give these groups train rows too, or make them ood_val"
        raise DataError(f"{table.name('split')}='id_val': {rows}; {remedy}")
    domains = domains_of(places, evaluating=evaluating)
    training = [domain for domain in domains if domain.role == "train" and not evaluating]
    if unvalidated := [domain for domain in training if domain.split and not len(domain.split.outside)]:
        listed = ", ".join(f"{domain.group} ({len(domain)} images)" for domain in unvalidated)
        _LOGGER.warning("%r: groups without id_val rows, which no validation counts: %s", str(table.path), listed)
    return domains


def _untrained(places: Places, names: np.ndarray) -> np.ndarray:
    """Marks validation rows of names without a training row, bool (N,)."""
    inside, outside = PARTS_OF_ROLES["train"]
    return (places.part == outside) & ~np.isin(names, names[places.part == inside])


def _domain(places: Places, role: str, group: str, member: np.ndarray, inside: str, outside: str) -> PlacesDomain:
    inside_rows, outside_rows = (np.flatnonzero(member & (places.part == part)) for part in (inside, outside))
    # Inside images come first, so that the split is two ranges.
    rows, first_outside = np.concatenate([inside_rows, outside_rows]), len(inside_rows)
    return PlacesDomain(
        name=role if group == POOLED else f"{role} {group}",
        role=role,
        group=group,
        classes=places.classes,
        targets=places.targets[rows],
        images=take(places.images, rows),
        metadata=places.metadata[rows],
        split=Split(np.arange(first_outside), np.arange(first_outside, len(rows))),
    )


def _existing(folder: Path) -> Callable[[str], str]:
    below_folder = below(folder)

    def parse(text: str) -> str:
        if (path := existing(below_folder(text))) is None:
            raise ValueError(text)
        return path

    return parse
