"""CUB-200-2011's layout in miniature: 200 classes of a few tiny photographs that are noise."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_cub(folder: Path, classes: int = 200, images: int = 2, seed: int = 0) -> list[str]:
    """Writes images/, images.txt, classes.txt, image_class_labels.txt, train_test_split.txt and bounding_boxes.txt.

    Sizes differ and are rarely multiples of 4; the first photograph is gray, as some of CUB's are.

    Returns:
        CLASS/IMAGE of every photograph.
    """
    random = np.random.RandomState(seed)
    names = [f"{label:03d}.Bird_{label}/Bird_{label}_{number:04d}_{label * 7 + number}.jpg"
             for label in range(1, classes + 1) for number in range(1, images + 1)]  # fmt: skip
    for number, name in enumerate(names):
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = random.randint(17, 30, 2)
        pixels = random.randint(0, 256, (height // 4 + 1, width // 4 + 1, 3)).astype(np.uint8)
        image = Image.fromarray(pixels).resize((int(width), int(height)))
        (image if number else image.convert("L")).save(path)
    labels = [int(name[:3]) for name in names]
    _write(folder / "images.txt", names)
    _write(folder / "classes.txt", [f"{label:03d}.Bird_{label}" for label in range(1, classes + 1)])
    _write(folder / "image_class_labels.txt", labels)
    _write(folder / "train_test_split.txt", [number % 2 for number in range(len(names))])
    _write(folder / "bounding_boxes.txt", ["2.0 2.0 12.0 12.0"] * len(names))
    return names


def _write(path: Path, values: list) -> None:
    path.write_text("".join(f"{number} {value}\n" for number, value in enumerate(values, 1)))
