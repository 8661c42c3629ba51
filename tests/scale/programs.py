"""Whole training programs in turns, A B A B: tools/finetune.py, DomainBed's train.py and timm's train.py.

    python -m tests.scale.programs domainbed DIR                       # a checkout of facebookresearch/DomainBed
    python -m tests.scale.programs domainbed DIR --network resnet50 --variant=--channels-last --variant=--no-eval-train
    python -m tests.scale.programs domainbed DIR --network deit_tiny_patch16_224 --format jpg
    python -m tests.scale.programs timm FILE                           # train.py of pytorch-image-models
    python -m tests.scale.programs domainbed DIR --checkout OLDER      # and finetune.py of another checkout

All train the same network on as many images with the same batches, rate and optimizer, as often and as long, with
augmentation as near as their options come; what each did is counted, and the script fails if it was not the same.
Images are made here: four domains of seven classes, 227 pixels. Against DomainBed three of them are trained on, and
every image is evaluated (--eval-train); against timm one, and its validation folder is what --no-eval-train leaves to
look at.
DomainBed's starting weights are random files under the names that torchvision looks for; networks other than its two
ResNets take the place of its featurizer. Time is wall clock of the whole process; "cpu" are
processor seconds, its workers' among them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image

from timm_moe_dg.measure.cost import interleaved, quartiles, ratios

from .timed_program import FEATURIZER

ROOT = Path(__file__).parents[2]
DOMAINS, CLASSES = ("art", "cartoon", "photo", "sketch"), 7
BATCH, RATE = 8, 5e-5
PUBLISHED = {"resnet18": "resnet18-f37072fd.pth", "resnet50": "resnet50-0676ba61.pth"}  # torchvision's names
PARTS = ("whole", "start", "steps", "evaluation", "rest", "cpu")


@dataclass(frozen=True)
class Program:
    """A program to run.

    Attributes:
        kind: See `timed_program`.
        path: Its script or checkout.
        words: Its arguments, without those of its output.
        output: Name of the argument for that.
    """

    kind: str
    path: str
    words: Sequence[str]
    output: Sequence[str]


def write_images(root: Path, per_class: int, suffix: str) -> None:
    """Makes DOMAIN/CLASS/IMAGE of smooth colors with some grain."""
    random = np.random.default_rng(0)
    for domain in DOMAINS:
        for label in range(CLASSES):
            folder = root / domain / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(per_class):
                coarse = Image.fromarray(random.integers(256, size=(16, 16, 3), dtype=np.uint8))
                smooth = np.asarray(coarse.resize((227, 227)), dtype=int) + random.integers(-8, 9, (227, 227, 1))
                Image.fromarray(smooth.clip(0, 255).astype(np.uint8)).save(folder / f"{number:04}.{suffix}")


def write_weights(home: Path, network: str) -> list[str]:
    """Writes random weights to where torchvision looks for published ones; the words that start a run from them."""
    if network not in PUBLISHED:
        return []
    file = home / "hub" / "checkpoints" / PUBLISHED[network]
    file.parent.mkdir(parents=True)
    torch.save(getattr(torchvision.models, network)(weights=None).state_dict(), file)
    return ["--initial-checkpoint", str(file)]


def finetunes(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Program]:
    """The runs of finetune.py: as it is, of another checkout, and with further words."""
    output = ("--output", "--experiment")
    found = {"finetune.py": Program("finetune", str(ROOT / "tools" / "finetune.py"), words, output)}
    if args.checkout:
        found[f"of {args.checkout}"] = Program("finetune", f"{args.checkout}/tools/finetune.py", words, output)
    for variant in args.variant:
        found[f"finetune.py {variant}"] = Program(
            "finetune", str(ROOT / "tools" / "finetune.py"), [*words, *variant.split()], output
        )
    return found


def against_domainbed(args: argparse.Namespace, root: Path, weights: Sequence[str]) -> dict[str, Program]:
    """The programs of a comparison on four domains, the first held out."""
    hparams = {"resnet18": args.network == "resnet18", "batch_size": BATCH, "lr": RATE, "weight_decay": 0.0}
    theirs = f"--data_dir {root} --dataset PACS --algorithm ERM --test_envs 0 --steps {args.steps} \
        --checkpoint_freq {args.eval_freq}".split()
    ours = f"--dataset folder --data-dir {root / 'PACS'} --test-domains 0 --steps {args.steps} --model {args.network} \
        --eval-freq {args.eval_freq} --eval-train --batch-size {BATCH} --lr {RATE} --weight-decay 0 \
        --img-size 224".split()
    still = [] if args.network in PUBLISHED else ["--drop-path", "0"]
    theirs_too = Program("domainbed", args.program, [*theirs, "--hparams", json.dumps(hparams)], ("--output_dir",))
    return {"DomainBed": theirs_too, **finetunes(args, [*ours, *weights, *still])}


def against_timm(args: argparse.Namespace, root: Path, weights: Sequence[str]) -> dict[str, Program]:
    """The programs of a comparison on one training domain, over two epochs, with two evaluations.

    finetune.py keeps a fifth of a domain for validation and looks at the domain held out too.
    """
    domain, held_out, batch = root / "PACS" / DOMAINS[0], root / "PACS" / DOMAINS[1], 3 * BATCH
    one = root / "one"
    images = sorted(domain.glob("*/*"))
    inside = len(images) - int(len(images) * 0.2)
    spread = [images[at] for at in np.random.default_rng(0).permutation(len(images))]
    _link(spread, root / "timm" / "train", inside, [])
    _link(spread[inside:], root / "timm" / "validation", len(images), sorted(held_out.glob("*/*")))
    one.mkdir()
    for source in (domain, held_out):
        (one / source.name).symlink_to(source)
    steps = 2 * (inside // batch)
    theirs = (
        f"{root / 'timm'} --model {args.network} --num-classes {CLASSES} -b {batch} -vb 64 --epochs 2 -j 2 --opt adam \
        --lr {RATE} --weight-decay 0 --sched step --warmup-epochs 0 --smoothing 0 --scale 0.7 1.0 --color-jitter 0.3 \
        --train-interpolation bilinear --interpolation bilinear --crop-pct 1.0 --device cpu --img-size 224".split()
    )
    theirs = [word for word in theirs if args.network not in PUBLISHED or word not in ("--img-size", "224")]
    ours = f"--dataset folder --data-dir {one} --test-domains 1 --steps {steps} --eval-freq {steps} --no-eval-train \
        --model {args.network} --batch-size {batch} --lr {RATE} --weight-decay 0 --img-size 224 --no-freeze-bn".split()
    still = [] if args.network in PUBLISHED else ["--drop-path", "0"]
    named = ("--output", "--experiment")
    return {"timm": Program("timm", args.program, theirs, named), **finetunes(args, [*ours, *still])}


def _link(images: Sequence[Path], folder: Path, count: int, others: Sequence[Path]) -> None:
    for image in [*images[:count], *others]:
        place = folder / image.parent.name
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{image.parents[1].name}-{image.name}").symlink_to(image)


def run(program: Program, folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Runs a program once.

    Returns:
        Seconds of `PARTS`, and counts: steps, images trained on, images evaluated, parameters.

    Raises:
        SystemExit: It failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory(dir=folder) as output:
        report, log = Path(output, "seen.json"), folder / "log.txt"
        places = dict(zip(program.output, (str(Path(output, "out")), "run"), strict=False))
        words = [word for pair in places.items() for word in pair]
        command = [sys.executable, "-m", "tests.scale.timed_program", str(report), program.kind, program.path]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with log.open("w") as said:
            done = subprocess.run(
                [*command, *program.words, *words], stdout=said, stderr=said, env=environment, cwd=ROOT, check=False
            )
        if done.returncode:
            raise SystemExit(f"{program.path} failed:\n{log.read_text()[-2000:]}")
        ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        seen = json.loads(report.read_text())
    evaluation = sum(end - begin for begin, end in seen["evaluations"])
    first, last = seen["steps"][0], seen["steps"][-1]
    between = sum(end - begin for begin, end in seen["evaluations"] if begin < last)
    found = {"whole": ended - began, "start": first - began, "steps": last - first - between, "evaluation": evaluation}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    counts = {"count": len(seen["steps"]), **{name: seen[name] for name in ("trained", "evaluated", "parameters")}}
    return {**found, "rest": found["whole"] - (last - began) - (evaluation - between), "cpu": cpu, **counts}


def show(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Prints medians in seconds, and the ratios of whole and processor seconds to the first program's, with quartiles.

    Raises:
        SystemExit: The programs did not do the same.
    """
    reference, *_ = found.values()
    sys.stdout.write(f"| program | {' | '.join(PARTS)} | images/s | whole, ratio | cpu, ratio |\n|{'---|' * 10}\n")
    for name, runs in found.items():
        medians = {part: statistics.median(run[part] for run in runs) for part in (*PARTS, "trained", "count")}
        rate = medians["trained"] * (1 - 1 / medians["count"]) / medians["steps"]  # the first step is part of the start
        cells = [f"{medians[part]:.1f}" for part in PARTS] + [f"{rate:.1f}"]
        for part in ("whole", "cpu"):
            found_ratios = ratios([run[part] for run in runs], [run[part] for run in reference])
            low, median, high = quartiles(found_ratios) if len(runs) > 1 else found_ratios * 3
            cells.append(f"{median:.2f} ({low:.2f}-{high:.2f})")
        sys.stdout.write(f"| {name} | {' | '.join(cells)} |\n")
    for part in ("count", "trained", "evaluated", "parameters"):
        sys.stdout.write(f"{part}: {', '.join(f'{name} {runs[0][part]:.0f}' for name, runs in found.items())}\n")
    if any(len({runs[0][part] for runs in found.values()}) > 1 for part in ("count", "trained", "parameters")):
        raise SystemExit("the programs did not do the same")


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="tests.scale.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("against", choices=("domainbed", "timm"), help="what is compared with")
    add("program", help="checkout of DomainBed, or timm's train.py")
    add("--network", default="resnet18", help="timm's name (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of each program (default: %(default)s)")
    add("--steps", type=int, default=25, help="against DomainBed (default: %(default)s)")
    add("--eval-freq", type=int, default=12, help="against DomainBed (default: %(default)s)")
    add("--images", type=int, default=14, help="per domain and class (default: %(default)s)")
    add("--format", choices=("png", "jpg"), default="png", help="of the images (default: %(default)s)")
    add("--threads", type=int, default=2, help="of torch (default: %(default)s)")
    add(
        "--variant", action="append", default=[], metavar="WORDS", help="a further run of finetune.py, with these words"
    )
    add("--checkout", metavar="DIR", help="a further run, of another checkout's finetune.py")
    return parser


def main() -> None:
    """Runs the command line."""
    args = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "PACS", args.images, args.format)
        weights = write_weights(root / "torch", args.network)
        programs = (against_domainbed if args.against == "domainbed" else against_timm)(args, root, weights)
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TORCH_HOME": str(root / "torch")}
        if args.against == "domainbed" and args.network not in PUBLISHED:
            environment[FEATURIZER] = args.network
        found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}

        def measure(name: str) -> float:
            found[name].append(run(programs[name], root, environment))
            sys.stderr.write(f"{name}: {found[name][-1]['whole']:.1f} s\n")
            return found[name][-1]["whole"]

        interleaved({name: partial(measure, name) for name in programs}, args.rounds)
        show(found)


if __name__ == "__main__":
    main()
