"""FMoW and iWildCam as the WILDS benchmark (Koh et al., 2021) released them, read from their folders and csv files.

FMoW (fmow_v1.1): images/rgb_img_{row}.png, where row counts all rows of rgb_metadata.csv (columns category, split,
timestamp, country_code, lat, lon among others), sequestered ones included; country_code_mapping.csv maps `alpha-3` to
`region`. 62 classes. Official split by time: train before 2013, "ood" validation 2013 to 2015, "ood" test from 2016.
License: FMoW Challenge Public License.

iWildCam (iwildcam_v2.0): train/{filename}, metadata.csv (columns split, y, filename, location_remapped among others),
categories.csv (y, name). 182 classes, 323 camera traps; those of val and test are not among those of train.
License: CDLA-Permissive-1.0.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..domains import UNGROUPED, DataDir
from ..texts import Texts
from .columns import SHOWN, below, choice, coordinates, field, parsed, read_csv
from .places import POOLED, Places, PlacesDomain, domains_of

REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania")  # in WILDS's order
HELD_OUT_REGION = "Asia"
_OOD_VALIDATION, _OOD_TEST = 2013, 2016  # first years
_OFFICIAL = {"train": "train", "id_val": "id_val", "id_test": "id_test", "val": "ood_val", "test": "ood_test"}

_LOGGER = logging.getLogger(__name__)


def read_fmow(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads FMoW with the official split by time.

    Args:
        data_dir: The folder that holds rgb_metadata.csv, or its parent.
        pooled: Train on all images as one domain, as WILDS does; otherwise on the five regions as domains, without
            images of no region.

    Raises:
        DataError: Files or columns are missing, or fields are empty or wrong; lines are named.
    """
    places = fmow_table(data_dir)
    if not pooled:
        places = _with_a_region(places)
    return domains_of(places, pooled=pooled)


def read_fmow_lao(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads FMoW with Asia left out (MoGE, section 2.4): nothing of it is trained on, and it is the "ood" test.

    The paper does not say which of Asia's images are the test: here those of both official test splits. "ood" images of
    other regions are left out.

    Args:
        data_dir: See `read_fmow`.
        pooled: Train on all images as one domain; otherwise on the four other regions as domains, without images of no
            region.

    Raises:
        DataError: See `read_fmow`.
    """
    places = fmow_table(data_dir)
    if not pooled:
        places = _with_a_region(places)
    held_out = places.group == HELD_OUT_REGION
    inside = {"id_test": "ood_test", "id_val": "ood_val", "train": "none"}
    outside = {"ood_test": "none", "ood_val": "none"}
    pairs = zip(places.part.tolist(), held_out, strict=True)
    part = np.array([(inside if held else outside).get(name, name) for name, held in pairs])
    return domains_of(replace(places, part=part), pooled=pooled)


def read_iwildcam(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads iWildCam with the official split by camera trap; the metadata are location ids.

    Traps that are not trained on have the id -1, unknown, and so the shared expert of MoGE.

    Args:
        data_dir: The folder that holds metadata.csv and categories.csv, or its parent.
        pooled: Train on all images as one domain; otherwise on the camera traps as domains. A trap with a single
            training image is one too, as in WILDS, whose group loader draws that image again and again: a warning
            counts such traps.

    Raises:
        DataError: Files or columns are missing, or fields are empty or wrong; lines are named.
    """
    root = release_folder(data_dir, "iwildcam_v2.0", "metadata.csv")
    table = root / "metadata.csv"
    rows = read_csv(table, ("split", "y", "filename", "location_remapped"))
    official = parsed(table, rows, "split", choice(*_OFFICIAL), f"one of {', '.join(_OFFICIAL)}")
    part = np.array([_OFFICIAL[name] for name in official])
    targets = np.array(parsed(table, rows, "y", int, "a class index"))
    locations = np.array(parsed(table, rows, "location_remapped", int, "a location id"))
    trained = np.isin(locations, locations[part == "train"])
    places = Places(
        classes=_iwildcam_classes(root, int(targets.max()) + 1),
        images=Texts(parsed(table, rows, "filename", below(root / "train"), "the name of a file below train/")),
        targets=targets,
        metadata=np.where(trained, locations, -1),
        part=part,
        group=np.full(len(rows), POOLED),
    )
    if pooled:
        return domains_of(places)
    _count_single_images(table, locations, part)
    return domains_of(places, training=np.array([f"location_{location:03}" for location in locations]))


def fmow_table(data_dir: DataDir) -> Places:
    """Reads the table of all images; the part of images outside the official split is "none", or "seq" if sequestered.

    Raises:
        DataError: See `read_fmow`.
    """
    root = release_folder(data_dir, "fmow_v1.1", "rgb_metadata.csv")
    table = root / "rgb_metadata.csv"
    rows = read_csv(table, ("category", "split", "timestamp", "country_code", "lat", "lon"))
    regions = _regions(root / "country_code_mapping.csv")
    split = parsed(table, rows, "split", choice("train", "val", "test", "seq"), "one of train, val, test, seq")
    years = parsed(table, rows, "timestamp", lambda text: int(text[:4]), "a time such as 2015-07-01T10:00:00Z")
    labels = parsed(table, rows, "category", str, "a category")
    classes = tuple(sorted(set(labels)))
    indices = {name: index for index, name in enumerate(classes)}
    return Places(
        classes=classes,
        images=Texts(os.path.join(root, "images", f"rgb_img_{row}.png") for row in range(len(rows))),
        targets=np.array([indices[label] for label in labels]),
        metadata=coordinates(table, rows),
        part=np.array([_fmow_part(*pair) for pair in zip(split, years, strict=True)], dtype="U8"),
        group=np.array([regions.get(code, UNGROUPED) for code in field(rows, "country_code")]),
    )


def _regions(table: Path) -> dict[str, str]:
    """The region of every country; countries without one, such as Antarctica, are in `UNGROUPED`."""
    rows = read_csv(table, ("alpha-3", "region"))
    named = [row for row in rows if (row["region"] or "").strip()]
    if not named:
        raise DataError(f"{str(table)!r}: no row has a region; give the release's table, whose regions are {REGIONS}")
    for line, row in enumerate(rows, start=2):
        if (row["region"] or "").strip() not in (*REGIONS, ""):
            raise DataError(f"{str(table)!r}: line {line} has the region {row['region']!r}; give one of {REGIONS}")
    return {row["alpha-3"]: row["region"].strip() for row in named}


def _with_a_region(places: Places) -> Places:
    """Leaves images of no region out of every part."""
    return replace(places, part=np.where(places.group == UNGROUPED, "none", places.part))


def _count_single_images(table: Path, locations: np.ndarray, part: np.ndarray) -> None:
    training = np.flatnonzero(part == "train")
    _, first, counts = np.unique(locations[training], return_index=True, return_counts=True)
    lines = sorted(training[first[counts == 1]] + 2)
    if lines:
        _LOGGER.warning(
            "%r: %d locations have a single training image (lines %s), which is drawn again and again, as WILDS does; "
            "mark these rows with another split to leave them out",
            *(str(table), len(lines), ", ".join(map(str, lines[:SHOWN])) + (", ..." if len(lines) > SHOWN else "")),
        )


def _fmow_part(split: str, year: int) -> str:
    """The official part of an image, or "none": most combinations of release split and year are not used."""
    if split == "seq":
        return split
    if year < _OOD_VALIDATION:
        return {"train": "train", "val": "id_val", "test": "id_test"}.get(split, "none")
    if year < _OOD_TEST:
        return "ood_val" if split == "val" else "none"
    return "ood_test" if split == "test" else "none"


def _iwildcam_classes(root: Path, number: int) -> tuple[str, ...]:
    table = root / "categories.csv"
    rows = read_csv(table, ("y", "name"))
    names = dict(zip(parsed(table, rows, "y", int, "a class index"), (row["name"] for row in rows), strict=True))
    lacking = [index for index in range(number) if index not in names]
    if lacking:
        raise DataError(f"{str(table)!r}: names no class {lacking[:5]}; give the release's categories.csv")
    return tuple(names[index] for index in range(number))


def release_folder(data_dir: DataDir, release: str, table: str) -> Path:
    """Finds the folder of a release, which may have been given itself or by its parent.

    Raises:
        DataError: No folder was given.
    """
    if data_dir is None:
        raise DataError(f"data_dir=None: give --data-dir, the folder {release} that holds {table}, or its parent")
    root = Path(data_dir)
    return root / release if (root / release / table).is_file() else root
