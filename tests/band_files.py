"""A place folder of small TIFF files with more bands than three, of two classes that differ in their first bands."""

import csv
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import DTypeLike

PLACES = {"Africa": (20, 5), "Europe": (10, 50), "Asia": (100, 30)}
SPLITS = {"Africa": ("train", "id_val", "id_test"), "Europe": ("train", "id_val", "id_test"), "Asia": ("ood_test",)}


def write_tiff(path: Path, values: np.ndarray) -> None:
    """Writes (bands, height, width) values as planes of one page."""
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate")


def band_folder(folder: Path, bands: int = 5, dtype: DTypeLike = np.uint16, images: int = 4, side: int = 16) -> Path:
    """Writes a folder as `read_place_folder` reads it."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    scale = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else 1.0
    rows = []
    for group, (lon, lat) in PLACES.items():
        for split in SPLITS[group]:
            for number in range(images):
                values = random.random((bands, side, side)) * 0.3
                values[number % 2] += 0.5
                name = f"{group}-{split}-{number}.tif"
                write_tiff(folder / name, (values * scale).astype(dtype))
                rows.append([name, ("field", "forest")[number % 2], lon + random.normal(), lat, split, group])
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "lon", "lat", "split", "group"], *rows])
    return folder
