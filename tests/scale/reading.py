"""A folder of DomainNet's size and a table of FMoW's: how long they take to read, and what that leaves in memory.

    python -m tests.scale.reading
    python -m tests.scale.reading --files 6000 --rows 5000

The folder has 6 domains of 345 classes; its files are links to one PNG of a pixel. The table is a metadata.csv beside
the domains, which names the first of these files, with coordinates, a year and a region. Both are opened as
tools/finetune.py opens them, split, and drawn from by two worker processes. What is new in each process, beside what
Python and torch take, is "private" below: copies made for it alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from timm_moe_dg.data import StepSampler, TrainingDraws, evaluation_only, get_benchmark, split_domains, training_loader
from timm_moe_dg.data.fingerprint import fingerprint
from timm_moe_dg.data.transforms import evaluation_transform

from .processes import Usage, family, total

DOMAINS, CLASSES = 6, 345
REGIONS = ("Africa", "Americas", "Asia", "Europe", "Oceania")
PARTS = ("train", "train", "id_val", "id_test", "ood_val", "ood_test")
STEPS = 100
LINKS = 50_000  # to one file; ext4 has at most 65,000
COLUMNS = ("stage", "cpu s", "RSS", "peak RSS", "private", "PSS workers", "private workers", "PSS of all")


def write_images(root: Path, files: int) -> list[str]:
    """Writes the folder of domains; returns the files' paths below it, in an order that mixes the domains."""
    pixel = root / "pixel.png"
    Image.new("RGB", (1, 1), (90, 120, 40)).save(pixel)
    folders = [f"domain_{domain}/class_{label:03}" for domain in range(DOMAINS) for label in range(CLASSES)]
    for folder in folders:
        (root / folder).mkdir(parents=True)
    names = [f"{folders[number % len(folders)]}/photograph_{number:06}.png" for number in range(files)]
    for number, name in enumerate(names):
        if number % LINKS == 0:
            pixel = shutil.copyfile(pixel, root / f"pixel_{number}.png")
        os.link(pixel, root / name)
    return names


def write_table(root: Path, names: list[str]) -> None:
    """Writes metadata.csv about some of the files."""
    random = np.random.default_rng(0)
    places = np.round(random.uniform((-180, -90), (180, 90), (len(names), 2)), 6)
    years = random.integers(2002, 2018, len(names))
    with (root / "metadata.csv").open("w") as file:
        file.write("path,label,lon,lat,split,group,year\n")
        for row, (name, (longitude, latitude), year) in enumerate(zip(names, places.tolist(), years, strict=True)):
            part, region = PARTS[row % len(PARTS)], REGIONS[row // 7 % len(REGIONS)]
            file.write(f"{name},{name.split('/')[1]},{longitude},{latitude},{part},{region},{year}\n")


def read(dataset: str, root: str) -> Iterator[tuple[str, float, list[Usage]]]:
    """Opens the data and draws from it.

    Args:
        dataset: folder or place_folder.
        root: Its folder.

    Yields:
        What was done, how long it took in seconds of this process's processor time, and the processes, this one first.
    """
    yield "start", time.process_time(), family(os.getpid())
    began = time.process_time()
    columns = ("year",) if dataset == "place_folder" else ()
    domains = get_benchmark(dataset).read(root, columns)
    yield f"{sum(map(len, domains))} images read", time.process_time() - began, family(os.getpid())
    began = time.process_time()
    fingerprint(domains)
    yield "fingerprint of them", time.process_time() - began, family(os.getpid())
    began = time.process_time()
    apart = evaluation_only(domains) or [0]
    training = [position for position in range(len(domains)) if position not in apart]
    splits = split_domains(domains, training, trial_seed=0)
    yield f"{len(domains)} domains split", time.process_time() - began, family(os.getpid())
    began = time.process_time()
    draws = TrainingDraws(domains, splits, evaluation_transform((8, 8), (0.5,) * 3, (0.5,) * 3), seed=0)
    batches = iter(training_loader(draws, StepSampler(training, 8), workers=2))
    for _ in islice(batches, STEPS):
        pass
    yield f"{STEPS} steps drawn by two workers", time.process_time() - began, family(os.getpid())


def measure(dataset: str, root: str) -> None:
    """Prints a row for each stage of `read`; workers as sums, memory in MiB."""
    torch.set_num_threads(1)
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for stage, seconds, (main, *workers) in read(dataset, root):
        of_workers = (total(workers), sum(one.private for one in workers))
        sizes = (main.rss, main.peak, main.private, *of_workers, total([main, *workers]))
        cells = (f"{dataset}: {stage}", f"{seconds:.1f}", *(f"{size:.0f}" for size in sizes))
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.reading", description=__doc__)
    parser.add_argument("--files", type=int, default=600_000)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--data-dir", help="a folder that was written before")
    parser.add_argument("--dataset", help="read this alone, in this process")
    args = parser.parse_args()
    if args.dataset:
        measure(args.dataset, args.data_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder), write_images(Path(folder), args.files)[: args.rows])
        for dataset in ("folder", "place_folder"):
            words = ["-m", "tests.scale.reading", "--dataset", dataset, "--data-dir", folder]
            subprocess.run([sys.executable, *words], check=True)


if __name__ == "__main__":
    main()
