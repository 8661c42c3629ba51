"""FMoW, iWildCam and Camelyon17 of the WILDS benchmark (Koh et al., 2021), read from the releases' folders and tables.

WILDS's protocol has an official split. DomainBed's form has whole regions or hospitals as domains, in the order of
WILDS's tables, so that its splits carry over.

FMoW (fmow_v1.1): images/rgb_img_{row}.png, where row counts all rows of rgb_metadata.csv (columns category, split,
timestamp, country_code, lat, lon among others), sequestered ones included. The table country_code_mapping.csv maps
`alpha-3` to `region`. 62 classes. Official split by time: train before 2013, "ood" validation 2013 to 2015, "ood" test
from 2016. DomainBed has six domains with all images but the sequestered ones, of all years. The last one, "Other", has
the few images without a region. License: FMoW Challenge Public License.

iWildCam (iwildcam_v2.0): train/{filename}, metadata.csv (columns split, y, filename, location_remapped among others),
categories.csv (y, name). 182 classes, 323 camera traps. The traps of val and test are not in train. License:
CDLA-Permissive-1.0.

Camelyon17 (camelyon17_v1.0): metadata.csv (columns patient, node, x_coord, y_coord, tumor, center among others) and
patches/patient_{patient}_node_{node}/patch_patient_{patient}_node_{node}_x_{x}_y_{y}.png. Two classes. License: CC0.

Readers take a release's folder or its parent. A `DataError` reports missing files and columns, and the lines of wrong
fields.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..domains import UNGROUPED, DataDir, file_names, given_folder, take
from .csv_tables import below, choice, number, read_csv, whole_number
from .folders import FolderDomain
from .places import POOLED, Places, PlacesDomain, domains_of

REGIONS = ("Asia", "Europe", "Africa", "Americas", "Oceania")  # in WILDS's order
SIX_REGIONS = (*REGIONS, UNGROUPED)
HELD_OUT_REGION = "Asia"
CENTERS = tuple("01234")
HOSPITALS = tuple(f"hospital_{center}" for center in CENTERS)

_OOD_VALIDATION, _OOD_TEST = 2013, 2016  # first years
_OFFICIAL = {"train": "train", "id_val": "id_val", "id_test": "id_test", "val": "ood_val", "test": "ood_test"}


def read_fmow(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads FMoW with the official split by time, `pooled` as one training domain, else as the five known regions."""
    return domains_of(_fmow_table(data_dir, regionless=pooled), pooled=pooled)


def read_fmow_lao(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads FMoW with Asia left out of training, as the "ood" test (MoGE, section 2.4). See `read_fmow` for `pooled`.

    The paper does not say which images of Asia are the test. Here it is those of both official test splits. "ood"
    images of other regions are left out, and so are Asia's validation images, with which selection would be an oracle.
    """
    places = _fmow_table(data_dir, regionless=pooled)
    in_asia = np.where(np.isin(places.part, ("id_test", "ood_test")), "ood_test", "none")
    elsewhere = np.where(np.isin(places.part, ("ood_test", "ood_val")), "none", places.part)
    part = np.where(places.group == HELD_OUT_REGION, in_asia, elsewhere)
    return domains_of(replace(places, part=part), pooled=pooled)


def read_fmow_by_region(data_dir: DataDir, domains: Sequence[str] = SIX_REGIONS) -> list[PlacesDomain]:
    """Reads FMoW in DomainBed's form, one domain for each region. Runs without "Other" do not compare with its."""
    places = _fmow_table(data_dir)
    released = places.part != "seq"
    members = {region: np.flatnonzero(released & (places.group == region)) for region in domains}
    return [
        PlacesDomain(
            region, places.classes, places.targets[rows], take(places.images, rows), metadata=places.metadata[rows]
        )
        for region, rows in members.items()
        if len(rows)
    ]


def read_iwildcam(data_dir: DataDir, pooled: bool = True) -> list[PlacesDomain]:
    """Reads iWildCam with the official split by camera trap: `pooled` as one training domain, else a domain for each.

    The metadata are location ids. Traps that are not trained on get -1, for which MoGE uses its shared expert. As in
    WILDS, a trap with a single training image is a domain too.
    """
    root = _release_folder(data_dir, "iwildcam_v2.0", "metadata.csv")
    table = read_csv(root / "metadata.csv", ("split", "y", "filename", "location_remapped"))
    official = table.parsed("split", choice(*_OFFICIAL), f"one of {', '.join(_OFFICIAL)}")
    part = np.array([_OFFICIAL[name] for name in official])
    targets = np.array(table.parsed("y", whole_number, "a class index"))
    locations = np.array(table.parsed("location_remapped", whole_number, "a location id"))
    # Ids of traps that are not trained on would mean nothing to an embedding.
    trained = np.isin(locations, locations[part == "train"])
    files = table.parsed("filename", below(root / "train"), "the name of a file below train/")
    places = Places(
        classes=_iwildcam_classes(root, int(targets.max()) + 1),
        images=file_names(files),
        targets=targets,
        metadata=np.where(trained, locations, -1),
        part=part,
        group=np.full(len(files), POOLED),
    )
    training = None if pooled else np.array([f"location_{location:03}" for location in locations])
    return domains_of(places, training=training)


def read_camelyon(data_dir: DataDir) -> list[FolderDomain]:
    """Reads Camelyon17 in DomainBed's form, one domain for each hospital."""
    root = _release_folder(data_dir, "camelyon17_v1.0", "metadata.csv")
    table = read_csv(root / "metadata.csv", ("patient", "node", "x_coord", "y_coord", "tumor", "center"))
    centers = np.array(table.parsed("center", choice(*CENTERS), "a hospital, 0 to 4"))
    targets = np.array(table.parsed("tumor", {"0": 0, "1": 1}.__getitem__, "0 or 1"))
    columns = [table.parsed(name, number, "a number") for name in ("patient", "node", "x_coord", "y_coord")]
    pattern = "patches/patient_{0}_node_{1}/patch_patient_{0}_node_{1}_x_{2}_y_{3}.png"
    paths = file_names(os.path.join(root, pattern.format(*row)) for row in zip(*columns, strict=True))
    members = {name: np.flatnonzero(centers == center) for center, name in zip(CENTERS, HOSPITALS, strict=True)}
    classes = ("normal", "tumor")
    return [FolderDomain(name, classes, targets[rows], paths[rows]) for name, rows in members.items() if len(rows)]


def _fmow_table(data_dir: DataDir, regionless: bool = True) -> Places:
    """All images of FMoW. Those outside the split have the part "none", or "seq" if sequestered."""
    root = _release_folder(data_dir, "fmow_v1.1", "rgb_metadata.csv")
    table = read_csv(root / "rgb_metadata.csv", ("category", "split", "timestamp", "country_code", "lat", "lon"))
    regions = _regions(root / "country_code_mapping.csv")
    split = table.parsed("split", choice("train", "val", "test", "seq"), "one of train, val, test, seq")
    years = table.parsed("timestamp", lambda text: int(text[:4]), "a time such as 2015-07-01T10:00:00Z")
    labels = table.parsed("category", str, "a category")
    classes = tuple(sorted(set(labels)))
    group = np.array([regions.get(code, UNGROUPED) for code in table["country_code"]])
    part = np.array([_fmow_part(*pair) for pair in zip(split, years, strict=True)])
    return Places(
        classes=classes,
        images=file_names(os.path.join(root, "images", f"rgb_img_{row}.png") for row in range(len(labels))),
        targets=np.searchsorted(classes, labels),
        metadata=table.coordinates().astype(np.float32),
        part=part if regionless else np.where(group == UNGROUPED, "none", part),
        group=group,
    )


def _regions(path: Path) -> dict[str, str]:
    """Maps country codes to regions. Countries without a region, such as Antarctica, are left out."""
    table = read_csv(path, ("alpha-3", "region"))
    regions = {code: region.strip() for code, region in zip(table["alpha-3"], table["region"], strict=True)}
    present = set(regions.values()) - {""}
    if not present or present - set(REGIONS):
        raise table.error(f"has the regions {sorted(present)}; give the release's table, whose regions are {REGIONS}")
    return {code: region for code, region in regions.items() if region}


def _fmow_part(split: str, year: int) -> str:
    """The official part of an image, or "none": most combinations of release split and year are not used."""
    if split == "seq":
        return split
    if year < _OOD_VALIDATION:
        return {"train": "train", "val": "id_val", "test": "id_test"}.get(split, "none")
    if year < _OOD_TEST:
        return "ood_val" if split == "val" else "none"
    return "ood_test" if split == "test" else "none"


def _iwildcam_classes(root: Path, count: int) -> tuple[str, ...]:
    table = read_csv(root / "categories.csv", ("y", "name"))
    names = dict(zip(table.parsed("y", whole_number, "a class index"), table["name"], strict=True))
    if missing := [index for index in range(count) if index not in names]:
        raise table.error(f"names no class {missing[:5]}; give the release's categories.csv")
    return tuple(names[index] for index in range(count))


def _release_folder(data_dir: DataDir, release: str, table: str) -> Path:
    root = given_folder(data_dir, f"{table}, {release} or its parent")
    return root / release if (root / release / table).is_file() else root
