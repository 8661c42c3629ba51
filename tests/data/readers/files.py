"""Small images and tables on disk, and how the tests of readers look at what was read."""

import csv
from pathlib import Path
from typing import Any

from PIL import Image

from timm_moe_dg.data import Domain


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_image(path: Path, gray: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (gray, gray, gray)).save(path)


def gray_of(domain: Domain, index: int) -> int:
    return domain.image(index).getchannel(0).tobytes()[0]


def by_name(domains: list[Domain]) -> dict[str, Domain]:
    return {domain.name: domain for domain in domains}
