"""Shards of predict that are killed at random times: no image is lost or predicted twice."""

import io
import multiprocessing
import os
import random
import tarfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.load_tool import run_tool
from tests.saved_run import saved_run
from timm_moe_dg.inference.predictor import Predictor

SHARDS, IMAGES, PART_SIZE, KILLS = 4, 1600, 40, 8


def write_tars(folder: Path) -> None:
    """Writes the images into one tar file for each shard."""
    stored = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 4, 3), dtype=np.uint8)).save(stored, "PNG")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(IMAGES // SHARDS):
                info = tarfile.TarInfo(f"{shard}-{number:05}.png")
                info.size = len(stored.getvalue())
                tar.addfile(info, io.BytesIO(stored.getvalue()))


def predict(words: list[object], log: Path) -> None:
    """Runs the command in a fork, and logs each part that it begins to compute."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    original = Predictor._predicted

    def noted(self, decoded):
        with log.open("a") as file:
            file.write(f"{os.getpid()}:{decoded.batch.part}\n")
        return original(self, decoded)

    with mock.patch.object(Predictor, "_predicted", noted):
        run_tool("predict", *words)


@pytest.mark.slow
def test_kills_lose_no_row_and_one_part_of_work_each(tmp_path):
    saved_run(tmp_path, "gmoe_tiny_patch16", ("ash", "oak"))
    write_tars(tmp_path)
    log, draw, fork = tmp_path / "log", random.Random(0), multiprocessing.get_context("fork")
    words = ["--model", tmp_path / "best", *sorted(tmp_path.glob("*.tar"))]
    words += ["--output", tmp_path / "parts", "--part-size", PART_SIZE, "--workers", 0]

    def start(shard):
        process = fork.Process(target=predict, args=([*words, "--shard", f"{shard}/{SHARDS}"], log))
        process.start()
        return process

    running, killed = [start(shard) for shard in range(SHARDS)], 0
    while killed < KILLS:
        time.sleep(draw.uniform(0, 0.2))
        shard = draw.randrange(SHARDS)
        if running[shard].is_alive():
            running[shard].kill()
            killed += 1
        running[shard].join()
        running[shard] = start(shard)
    for process in running:
        process.join()
        assert process.exitcode == 0

    parts = sorted((tmp_path / "parts").glob("part-*.parquet"))
    predicted = Counter(path for part in parts for path in pq.read_table(part, columns=["path"])["path"].to_pylist())
    assert (len(predicted), set(predicted.values())) == (IMAGES, {1})
    assert len(parts) == IMAGES // PART_SIZE
    assert not [path for path in (tmp_path / "parts").iterdir() if path.name.startswith(".")]
    computed = set(log.read_text().split())
    assert len(computed) - len(parts) <= KILLS  # parts that were begun by a killed process
