"""A new benchmark is a reader and a row in a module outside the package, and the tools find it by name."""

import importlib
import sys

import numpy as np
import pytest
from PIL import Image

from tests.load_tool import run_tool
from timm_moe_dg.data import BENCHMARKS, benchmarks, get_benchmark

MODULE = """
from pathlib import Path

from timm_moe_dg.data import Benchmark, register_benchmark
from timm_moe_dg.data.readers.csv_tables import below, read_csv
from timm_moe_dg.data.readers.folders import FolderDomain

CLASSES = ("dark", "light")
LAMPS = ("blue", "green", "red")


def read_shades(data_dir):
    table = read_csv(Path(data_dir) / "shades.csv", ("file", "label", "lamp"))
    files = table.parsed("file", below(Path(data_dir)), "a file below the folder")
    targets = table.parsed("label", CLASSES.index, "dark or light")
    members = {lamp: [index for index, name in enumerate(table["lamp"]) if name == lamp] for lamp in LAMPS}
    return [
        FolderDomain(lamp, CLASSES, [targets[index] for index in indices], [files[index] for index in indices])
        for lamp, indices in members.items()
    ]


facts = {"source": "made up", "license": "CC0", "domains": LAMPS, "num_classes": 2}
training = {"steps": 3, "checkpoint_freq": 3, "augmentation": "none", "image_size": 16}
register_benchmark(Benchmark(name="shades", reader=read_shades, **facts, **training))
"""


@pytest.fixture
def shades(tmp_path, monkeypatch):
    """Writes the images of the benchmark, and its module, which is unloaded after the test."""
    lines = ["file,label,lamp"]
    for number in range(36):
        lamp, light = number % 3, number // 3 % 2
        pixels = np.zeros((8, 8, 3), dtype=np.uint8)
        pixels[..., 2 - lamp] = 60 + 140 * light + number
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{('dark', 'light')[light]},{('blue', 'green', 'red')[lamp]}")
    (tmp_path / "shades.csv").write_text("\n".join(lines))
    (tmp_path / "shades.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    benchmarks._ROWS.pop("shades", None)
    sys.modules.pop("shades", None)


def test_the_row_is_found_by_its_name_reads_the_data_and_is_planned(shades, capsys):
    assert "shades" not in BENCHMARKS
    importlib.import_module("shades")
    domains = get_benchmark("shades").read(shades)
    assert [(domain.name, len(domain)) for domain in domains] == [("blue", 12), ("green", 12), ("red", 12)]
    assert domains[0].targets == [0, 1] * 6
    assert domains[2].image(1).getpixel((0, 0)) == (60 + 140 + 5, 0, 0)
    words = ["--datasets", "shades", "--data-dir", shades, "--trial-seeds", 0, "--output", shades / "runs"]
    run_tool("sweep", *words, "--dry-run")
    assert capsys.readouterr().out.count("--dataset shades") == 3
