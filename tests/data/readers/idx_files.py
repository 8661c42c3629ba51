"""Small IDX files, written by hand as the format is described."""

import gzip
import struct
from pathlib import Path

import numpy as np

MAGIC = {3: b"\x00\x00\x08\x03", 1: b"\x00\x00\x08\x01"}


def write_idx(path: Path, values: np.ndarray, zipped: bool = False) -> Path:
    """Writes unsigned bytes."""
    sizes = b"".join(struct.pack(">I", size) for size in values.shape)
    content = MAGIC[values.ndim] + sizes + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path


def write_release(folder: Path, train: int = 40, test: int = 13, zipped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Writes the four files with random images; returns all images and labels, training first."""
    random = np.random.default_rng(5)
    images = random.integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, train + test, dtype=np.uint8)
    end = ".gz" if zipped else ""
    for part, members in (("train", slice(train)), ("t10k", slice(train, None))):
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", images[members], zipped)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", labels[members], zipped)
    return images, labels
