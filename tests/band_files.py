"""A place folder of small TIFF files with more bands than three, of two classes that differ in their first bands."""

import csv
from pathlib import Path

import numpy as np
import tifffile

PLACES = {"Africa": (20, 5), "Europe": (10, 50), "Asia": (100, 30)}
SPLITS = {"Africa": ("train", "id_val", "id_test"), "Europe": ("train", "id_val", "id_test"), "Asia": ("ood_test",)}


def write_tiff(path: Path, values: np.ndarray) -> None:
    """Writes (bands, height, width) values as planes of one page."""
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate")


def band_folder(folder: Path, bands: int = 5) -> Path:
    """Writes a folder as `read_place_folder` reads it, with four images of 16 bits for each place and split."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = []
    for group, (lon, lat) in PLACES.items():
        for split in SPLITS[group]:
            for number in range(4):
                values = random.random((bands, 16, 16)) * 0.3
                values[number % 2] += 0.5
                name = f"{group}-{split}-{number}.tif"
                write_tiff(folder / name, (values * 65535).astype(np.uint16))
                rows.append([name, ("field", "forest")[number % 2], lon + random.normal(), lat, split, group])
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "lon", "lat", "split", "group"], *rows])
    return folder
