"""Little copies of data sets on disk: images, tables and IDX files, and how tests look at what was read."""

import csv
import gzip
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data import Benchmark, Domain, get_benchmark
from timm_moe_dg.data.inspection import digest, fingerprint
from timm_moe_dg.errors import ImageReadError

CLASSES = tuple(f"class_{index}" for index in range(7))


def write_image(path: Path, gray: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (gray, gray, gray)).save(path)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_domains(root: Path, domains: Sequence[str], classes: Sequence[str] = CLASSES, images: int = 2) -> Path:
    for domain in domains:
        for name in classes:
            for index in range(images):
                write_image(root / domain / name / f"{domain}_{index}.png")
    return root


def write_noise(root: Path, domains: Iterable[str], classes: Iterable[str], images: int, side: int = 32) -> Path:
    """Writes square images of noise as DOMAIN/CLASS/NUMBER.png."""
    random = np.random.default_rng(0)
    for domain, name in product(domains, classes):
        (root / domain / name).mkdir(parents=True)
        for number in range(images):
            pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / domain / name / f"{number}.png")
    return root


def small(name: str) -> Benchmark:
    """A row that expects little copies of its data set."""
    row = get_benchmark(name)
    return replace(row, images=dict.fromkeys(row.domains, 14))


def write_idx(path: Path, values: np.ndarray, zipped: bool) -> None:
    """Writes unsigned bytes, as the IDX format is described."""
    sizes = b"".join(struct.pack(">I", size) for size in values.shape)
    content = bytes([0, 0, 8, values.ndim]) + sizes + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if zipped else content)


def write_release(folder: Path, train: int = 40, test: int = 13, zipped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Writes MNIST's four files with random images; returns all images and labels, training first."""
    random = np.random.default_rng(5)
    images = random.integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, train + test, dtype=np.uint8)
    end = ".gz" if zipped else ""
    for part, members in (("train", slice(train)), ("t10k", slice(train, None))):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", images[members], zipped)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", labels[members], zipped)
    return images, labels


def signature(name: str) -> str:
    """A digest of the names, numbers of images, labels and official splits of a data set that is made here."""
    tables = fingerprint(get_benchmark(name).read(None))
    return digest(str([[table[key] for key in ("name", "images", "labels", "split")] for table in tables]).encode())


def read_few(patch: pytest.MonkeyPatch, step: int) -> None:
    """Has benchmarks read only every so many images of each domain."""

    def few(benchmark: Benchmark, read: Callable[..., list[Domain]], *words: Any, **options: Any) -> list[Domain]:
        domains = read(benchmark, *words, **options)
        return [domain.without({*range(len(domain))} - {*range(0, len(domain), step)}) for domain in domains]

    patch.setattr(Benchmark, "read", partialmethod(few, Benchmark.read))


class Toy(Domain[int]):
    """Numbers, of which negative ones cannot be read."""

    def image(self, index: int) -> Image.Image:
        if self.images[index] < 0:
            raise ImageReadError(f"image={self.images[index]}")
        return Image.new("RGB", (1, 1), (self.images[index],) * 3)


def gray_of(domain: Domain, index: int) -> int:
    return domain.image(index).getchannel(0).tobytes()[0]


def by_name(domains: Sequence[Domain]) -> dict[str, Domain]:
    return {domain.name: domain for domain in domains}
