"""Little copies of benchmarks made of folders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from timm_moe_dg.data import Benchmark, get_benchmark

CLASSES = tuple(f"class_{index}" for index in range(7))


def write_domains(root: Path, domains: Sequence[str], classes: Sequence[str] = CLASSES, images: int = 2) -> Path:
    for domain in domains:
        for name in classes:
            (root / domain / name).mkdir(parents=True)
            for index in range(images):
                Image.new("RGB", (4, 4)).save(root / domain / name / f"{domain}_{index}.png")
    return root


def small(name: str, **changes: Any) -> Benchmark:
    """A row that expects little copies of its data set."""
    row = get_benchmark(name)
    return replace(row, images=dict.fromkeys(row.domains, 14), **changes)
