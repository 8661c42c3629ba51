"""Times whole programs on a folder of photographs: predict.py with and without --engine, and timm's programs.

    python -m tests.scale.engines
    python -m tests.scale.engines --timm SOURCES    # a folder with timm's inference.py and validate.py

Programs run in turns, each on all images and on a few. The difference gives the time of an image without start-up. The
ONNX program is exported before. Weights and images are random.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from timm_moe_dg.measure.cost import quartiles, ratios
from timm_moe_dg.networks.build import build_network, data_config, save_network

from .processes import Cost, cost

TOOLS = Path(__file__).parents[2] / "tools"
CLASSES = tuple(f"class{number}" for number in range(4))
DOMAINS = ("left", "right")
FEW = 16
Key = tuple[str, int]  # a program and its number of images
ENGINE, OURS, THEIRS, SCORES, THEIR_SCORES = (
    "predict.py --engine model.onnx",
    "predict.py",
    "timm's inference.py",
    "evaluate.py",
    "timm's validate.py",
)
AGAINST = {ENGINE: OURS, OURS: THEIRS, SCORES: THEIR_SCORES}
_REGISTERED = "import runpy, sys, timm_moe_dg; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def write_images(folder: Path, number: int, side: int = 256) -> Path:
    """Writes JPEG files of a photograph's size and detail, DOMAIN/CLASS/IMAGE, as many of each; returns the folder."""
    random = np.random.default_rng(0)
    for index in range(number):
        place = folder / DOMAINS[index % 2] / CLASSES[index // 2 % len(CLASSES)]
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(random.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(place / f"{index:05}.jpg", quality=90)
    return folder


def programs(model: str, onnx: Path, images: Path, batch_size: int, timm: Path | None) -> dict[str, list[str]]:
    """The command line of each program on a folder of images."""
    common = ["--model", model, "--batch-size", str(batch_size), "--workers", "2"]
    predict = [sys.executable, str(TOOLS / "predict.py"), *common, "--device", "cpu", str(images)]
    commands = {OURS: predict, ENGINE: [*predict, "--engine", str(onnx)]}
    if timm is not None:
        data = ["--dataset", "folder", "--data-dir", str(images)]
        theirs = ["--data-dir", str(images), *common, "--device", "cpu"]
        commands[SCORES] = [sys.executable, str(TOOLS / "evaluate.py"), *common, *data]
        commands[THEIRS] = [sys.executable, "-c", _REGISTERED, str(timm / "inference.py"), *theirs]
        commands[THEIR_SCORES] = [sys.executable, "-c", _REGISTERED, str(timm / "validate.py"), *theirs]
    return commands


def measure(commands: Mapping[Key, list[str]], rounds: int, env: Mapping[str, str]) -> dict[Key, list[Cost]]:
    """Runs commands in turns; by program and number of images, one cost for each round but the first."""
    costs = [{key: cost(words, env) for key, words in commands.items()} for _ in range(1 + rounds)]
    return {key: [row[key] for row in costs[1:]] for key in commands}


def report(measured: Mapping[Key, Sequence[Cost]]) -> Iterator[str]:
    """The table in Markdown: whole programs, an image after start-up, and the ratio of both within rounds."""
    few, many = sorted({number for _, number in measured})
    yield f"| program, {many} images | seconds | of processors | ms per image after start-up | ratio | per image |"
    yield "|---|---|---|---|---|---|"
    whole = {name: [run.seconds for run in runs] for (name, number), runs in measured.items() if number == many}
    per_image = {
        name: [
            1e3 * (most - least.seconds) / (many - few)
            for most, least in zip(whole[name], measured[name, few], strict=True)
        ]
        for name in whole
    }
    for name, seconds in whole.items():
        other = AGAINST.get(name)
        compared = [
            f"{_shown(ratios(values[name], values[other]), 2)} of {other}" if other in values else ""
            for values in (whole, per_image)
        ]
        processors = _shown([run.processor for run in measured[name, many]], 1)
        cells = [name, _shown(seconds, 1), processors, _shown(per_image[name], 1), *compared]
        yield f"| {' | '.join(cells)} |"


def _shown(values: Sequence[float], digits: int) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(prog="tests.scale.engines", description=__doc__)
    parser.add_argument("--model", default="gmoe_small_patch16")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timm", type=Path, metavar="FOLDER", help="inference.py and validate.py of timm's sources")
    return parser


def main() -> None:
    """Runs the command line."""
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        network = build_network(args.model, len(CLASSES), img_size=args.img_size)
        save_network(network, root / "model", CLASSES, data_config(network, args.img_size))
        folders = {number: write_images(root / str(number), number) for number in (FEW, args.images)}
        env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        model = f"local-dir:{root / 'model'}"
        export = [sys.executable, str(TOOLS / "export.py"), "--model", model, "--formats", "onnx", "--rounds", "1"]
        subprocess.run([*export, "--output", str(root)], env=env, check=True)
        commands = {
            (name, number): words
            for number, folder in folders.items()
            for name, words in programs(model, root / "model.onnx", folder, args.batch_size, args.timm).items()
        }
        costs = measure(commands, args.rounds, env)
    sys.stdout.write("\n".join(report(costs)) + "\n")


if __name__ == "__main__":
    main()
