"""Predictions of any number of images: the memory that they take, and what 200 kills of the command leave.

    python -m tests.scale.predicting memory 10000 100000 1000000
    python -m tests.scale.predicting kills 200

The network costs almost nothing, and images of 4 x 4 pixels are in tar files with their coordinates. Memory is the
largest that one process had, as the kernel counts it. Kills hit one of four shards at random times, and the shard
is started again.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
import unittest.mock
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.inference.image_rows import Decoded
from timm_moe_dg.inference.predictor import Column, Predictor

from . import stand_in
from .processes import cost

SHARDS = 4
FILE = 10_000  # images of a tar file


def command(python: str, model: str, tars: Sequence[Path], output: Path, *further: str) -> list[str]:
    """The words of a prediction on one core."""
    words = [python, str(TOOLS / "predict.py"), "--import", "tests.scale.stand_in", "--model", model]
    return [*words, *map(str, tars), "--output", str(output), "--workers", "1", "--batch-size", "256", *further]


def predicted(folder: Path) -> Iterator[str]:
    """The paths in the finished parts."""
    for path in sorted(folder.glob("part-*.parquet")):
        yield from pq.read_table(path, columns=["path"])["path"].to_pylist()


def measure_memory(sizes: Sequence[int], root: Path) -> Iterator[str]:
    """A row of a Markdown table for each number of images, multiples of 10,000."""
    yield "| images | MiB of the largest process | seconds | of processors |\n|---|---|---|---|"
    model, (tar,) = stand_in.save_stand_in(root / "model"), stand_in.write_tars(root, FILE, FILE)
    for size in sizes:
        output, links = root / f"parts{size}", [root / f"{number:05}-{size}.tar" for number in range(size // FILE)]
        for link in links:
            link.hardlink_to(tar)  # other paths, and so other images
        words = command(sys.executable, model, [root / f"*-{size}.tar"], output)
        used = cost(words, {**os.environ, "PYTHONPATH": str(TOOLS.parent)})
        rows = sum(1 for _ in predicted(output))
        if rows != size:
            raise SystemExit(f"{rows} rows of {size} images")
        yield f"| {size:,} | {used.peak:.0f} | {used.seconds:.0f} | {used.processor:.0f} |"


class Killed(NamedTuple):
    """What kills left behind."""

    kills: int
    images: int
    lost: int  # images without a row
    doubled: int  # rows beyond one for each image
    parts: int
    again: int  # parts that were computed again, whole or in part
    leftovers: int  # hidden files


def kill_shards(kills: int, images: int, part_size: int, root: Path, pause: float = 0.4, seed: int = 0) -> Killed:
    """Kills shards of a job at random times, up to `pause` seconds after the last, and lets the job finish.

    The processes are forks of this one, which saves the time of their imports.
    """
    model, tars = stand_in.save_stand_in(root / "model"), stand_in.write_tars(root / "tars", images, images // 4)
    log, draw, fork = root / "log", random.Random(seed), multiprocessing.get_context("fork")

    def start(shard: int) -> multiprocessing.process.BaseProcess:
        words = command("", model, tars, root / "parts", "--part-size", str(part_size))[4:]
        workers = str(shard % 2)
        process = fork.Process(target=_predict, args=([*words, "--shard", f"{shard}/{SHARDS}", "-j", workers], log))
        process.start()
        return process

    running, killed = {shard: start(shard) for shard in range(SHARDS)}, 0
    while killed < kills:
        time.sleep(draw.uniform(0, pause))
        shard = draw.randrange(SHARDS)
        if running[shard].is_alive():
            running[shard].kill()
            killed += 1
        running[shard].join()
        running[shard] = start(shard)
    for process in running.values():
        process.join()
        if process.exitcode:
            raise SystemExit(f"status {process.exitcode}; see {root / 'errors'}")
    paths = Counter(predicted(root / "parts"))
    parts, computed = len(list((root / "parts").glob("part-*"))), set(log.read_text().split())
    hidden = [path for path in (root / "parts").iterdir() if path.name.startswith(".")]
    doubled = sum(paths.values()) - len(paths)
    return Killed(killed, images, images - len(paths), doubled, parts, len(computed) - parts, len(hidden))


def _predict(words: Sequence[str], log: Path) -> None:
    """Runs the command in a fork, and logs each part that it begins to compute."""
    for stream, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(log.parent / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    original = Predictor._predicted

    def noted(self: Predictor, decoded: Decoded) -> dict[str, Column]:
        with log.open("a") as file:
            file.write(f"{os.getpid()}:{decoded.batch.part}\n")
        return original(self, decoded)

    with unittest.mock.patch.object(Predictor, "_predicted", noted):
        load_tool("predict").main(words)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.predicting", description=__doc__)
    parser.add_argument("what", choices=("memory", "kills"))
    parser.add_argument("numbers", type=int, nargs="+")
    parser.add_argument("--images", type=int, default=100_000, help="of kills")
    parser.add_argument("--part-size", type=int, default=200, help="of kills")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "memory":
            for line in measure_memory(args.numbers, Path(folder)):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        else:
            sys.stdout.write(f"{kill_shards(args.numbers[0], args.images, args.part_size, Path(folder))}\n")


if __name__ == "__main__":
    main()
