"""Draws the made-up images of pages: `python -m tests.page_data hospitals photos` (see tests/write_outputs.py)."""

import csv
import sys
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

SITES = ("hospital_a", "hospital_b", "hospital_c", "hospital_d")
CLASSES = ("benign", "malignant")
SIDE = 48  # pixels


def draw(label: int, tint: float, random: np.random.Generator) -> Image.Image:
    """Draws a round (label 0) or square (1) spot, in the tint of its site."""
    y, x = np.mgrid[:SIDE, :SIDE] - random.uniform(18, 30, (2, 1, 1))
    distance = np.maximum(abs(x), abs(y)) if label else np.hypot(x, y)
    spot = (distance < random.uniform(8, 14))[..., None]
    values = np.where(spot, (120, 60, 40), (220, 180, 160)) * tint + random.normal(0, 8, (SIDE, SIDE, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def hospitals(folder: Path) -> None:
    """Writes FOLDER/HOSPITAL/CLASS/IMAGE: four hospitals, 16 images of one class and 8 of the other in each."""
    random = np.random.default_rng(0)
    for number, site in enumerate(SITES):
        for label, (name, count) in enumerate(zip(CLASSES, (16, 8), strict=True)):
            (folder / site / name).mkdir(parents=True)
            for image in range(count):
                draw(label, 0.7 + 0.1 * number, random).save(folder / site / name / f"{image:02}.png")


def new_photos(folder: Path) -> None:
    """Writes four images without labels."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    for image in range(4):
        draw(image % 2, 0.8, random).save(folder / f"new_{image}.png")


def patients(folder: Path) -> None:
    """Writes hospitals and their FOLDER/patients.csv: path, label, hospital, patient; two images for each patient."""
    hospitals(folder)
    paths = sorted(folder.glob("*/*/*.png"))
    rows = [
        (path.relative_to(folder), path.parts[-2], path.parts[-3], f"p{number // 2:03}")
        for number, path in enumerate(paths)
    ]
    with (folder / "patients.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "hospital", "patient"), *rows])


def tiles(folder: Path) -> None:
    """Writes FOLDER/CLASS/NUMBER.tif with ten bands, in three regions, and FOLDER/places.csv: path, lon, lat."""
    random = np.random.default_rng(2)
    corners = [(lon + 5 * block, lat) for lon, lat in ((0, 45), (15, 0), (-60, -15)) for block in range(4)]
    rows = []
    for number, (lon, lat) in enumerate(corner for corner in corners for _ in range(6)):
        label = number % 2
        values = random.uniform(0, 3000, (10, 16, 16))
        values[label] += 3000
        path = Path(("crops", "forest")[label], f"{number:03}.tif")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(folder / path, values.astype(np.uint16), photometric="minisblack", planarconfig="separate")
        rows.append((path, round(lon + random.uniform(0, 5), 3), round(lat + random.uniform(0, 5), 3)))
    with (folder / "places.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "lon", "lat"), *rows])


def domain_net(folder: Path) -> None:
    """Writes the folders of DomainNet with one image for each class and domain."""
    image = draw(0, 1.0, np.random.default_rng(3)).resize((8, 8))
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        for number in range(345):
            name = folder / "domain_net" / domain / f"class_{number:03}"
            name.mkdir(parents=True)
            image.save(name / "0.png")


DATA = {
    "domain_net": domain_net,
    "tiles": tiles,
    "hospitals": hospitals,
    "new_photos": new_photos,
    "patients": patients,
}

if __name__ == "__main__":
    DATA[sys.argv[1]](Path(sys.argv[2]))
