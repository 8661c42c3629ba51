"""A calibrated network, a MoGE with training locations, and images, for tests of evaluate and of predict."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from tests.load_tool import run_tool
from tests.saved_run import saved_run
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.networks.build import data_config, save_network

TREES = ("ash", "beech", "oak")
QUICK = ["--workers", "0", "--batch-size", "2", "--part-size", "3"]


def predict(*words):
    run_tool("predict", *words, *QUICK)


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory):
    """A network that was calibrated and evaluated, and images."""
    folder = tmp_path_factory.mktemp("calibrated")
    saved_run(folder, "gmoe_tiny_patch16", CLASSES)
    words = ["--model", folder / "best", "--dataset", "rotated_digits", "--test-domains", "rot_75"]
    words += ["--workers", 0, "--batch-size", 500]
    run_tool("evaluate", *words, "--output", folder / "before")
    run_tool("evaluate", *words, "--calibrate", "--output", folder / "after")
    (folder / "images").mkdir()
    digits = get_benchmark("rotated_digits").read(None)[0]
    for index in range(5):
        digits.image(index).convert("RGB").save(folder / "images" / f"{index}.png")
    Image.new("RGB", digits.image(0).size).save(folder / "images" / "black.png")
    (folder / "images" / "cut.png").write_bytes((folder / "images" / "0.png").read_bytes()[:70])
    return folder


@pytest.fixture(scope="session")
def moge(tmp_path_factory):
    """A model with two training locations."""
    folder = tmp_path_factory.mktemp("moge")
    network = saved_run(folder, "moge_tiny", TREES)
    network.set_coverage(torch.tensor([[10.0, 50.0], [-60.0, -30.0]]))
    save_network(network, folder / "best", TREES, data_config(network, 32))
    return f"local-dir:{folder / 'best'}"


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Ten images and a list of them with coordinates."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(10)]
    for name in names:
        Image.fromarray(noise.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / name)
    lon, lat = noise.uniform(-180, 180, 10), noise.uniform(-90, 90, 10)
    lon[4] = lat[4] = math.nan
    pd.DataFrame({"path": names, "lon": lon, "lat": lat}).to_csv(folder / "list.csv", index=False, na_rep="nan")
    return folder
