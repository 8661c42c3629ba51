"""Draws the made-up images of pages: `python -m tests.page_data hospitals photos` (see tests/write_outputs.py)."""

import csv
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
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
    """Writes hospitals and FOLDER/metadata.csv: path, diagnosis, hospital, patient; two images for each patient."""
    hospitals(folder)
    paths = sorted(folder.glob("*/*/*.png"))
    rows = [
        (path.relative_to(folder), path.parts[-2], path.parts[-3], f"p{number // 2:03}")
        for number, path in enumerate(paths)
    ]
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "diagnosis", "hospital", "patient"), *rows])


def domain_net(folder: Path) -> None:
    """Writes the folders of DomainNet with one image for each class and domain."""
    image = draw(0, 1.0, np.random.default_rng(3)).resize((8, 8))
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        for number in range(345):
            name = folder / "domain_net" / domain / f"class_{number:03}"
            name.mkdir(parents=True)
            image.save(name / "0.png")


def sweep(folder: Path) -> None:
    """Writes runs that never ran: six hospitals and their pairs held out, two models and three seeds."""
    from tests.invented import invented_records, write_run

    names, random = [f"hospital_{letter}" for letter in "abcdef"], np.random.default_rng(4)
    levels = np.array([0.81, 0.86, 0.69, 0.9, 0.84, 0.78])
    held_out = [[domain] for domain in range(6)] + [[a, b] for a in range(6) for b in range(a)]
    for (number, model), test, seed in product(
        enumerate(("gmoe_tiny_patch16", "deit_tiny_patch16_224")), held_out, range(3)
    ):
        options: dict[str, Any] = {"model": model, "domains": names, "num_classes": 2, "dataset": "folder"}
        counts = {"split_sizes": [[200, 50]] * 6, "most_frequent": [[n, n // 4] for n in (105, 108, 96, 110, 104, 101)]}
        options |= {**counts, "most_frequent_class": "benign", "classes_present": [[2, 2, 2]] * 6}
        records = invented_records(test, num_domains=6, trial_seed=seed, at=(0,), **options)
        noise = random.normal(0, 0.02, 6) - 0.015 * number - 0.03 * (len(test) - 1)
        record = replace(records[0], in_acc=tuple(levels + noise), out_acc=tuple(0.93 + noise / 2))
        record = replace(record, metrics={"balanced_accuracy": tuple(levels + noise - 0.01)})
        write_run(folder / f"{model}-{'_'.join(map(str, test))}-{seed}", [record])


DATA = {
    "sweep": sweep,
    "domain_net": domain_net,
    "hospitals": hospitals,
    "new_photos": new_photos,
    "patients": patients,
}

if __name__ == "__main__":
    DATA[sys.argv[1]](Path(sys.argv[2]))
