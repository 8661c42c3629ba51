"""Images per second of the training loader against DomainBed's, interleaved so that a noisy machine cancels.

    python tools/benchmark_loader.py                                           # on generated files, in this process
    python tools/benchmark_loader.py --workers 2 --model gmoe_tiny_patch16     # and what a training step waits for
    python tools/benchmark_loader.py --data-dir PACS --workers 8 --device cuda --model gmoe_small_patch16

Files are cut from the two photographs that come with scikit-learn, in the sizes of PACS, OfficeHome and TerraIncognita,
or all images below --data-dir, pooled as one domain. DomainBed's loader is written out below: PIL, torchvision's first
transforms, random draws with replacement, as many worker processes as ours, one thread each. Rounds go A B A B; each
ratio is taken within a round, and the median over rounds is shown with the lowest and the highest.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision import transforms

import timm_moe_dg
from timm_moe_dg.cli.arguments import non_negative_int, output_file, parse_words, positive_int, usable_device
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.data import (
    FolderDomain,
    Split,
    StepSampler,
    TrainingDraws,
    read_folder,
    training_loader,
    training_transform,
)
from timm_moe_dg.errors import MissingDependencyError
from timm_moe_dg.measure.timing import interleaved, ratios, seconds_of
from timm_moe_dg.networks.build import check_name

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIDE = 224


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, metavar="DIR", help="DOMAIN/CLASS/IMAGE to read (default: generated files)")
    sizes = "WIDTHxHEIGHT of generated files, in pixels (%(default)s)"
    add("--size", nargs="+", type=size, default=[(227, 227), (500, 375), (1024, 747)], help=sizes)
    add("--images", type=positive_int, default=64, help="generated files of each size (%(default)s)")
    add(
        "--workers",
        type=non_negative_int,
        default=0,
        help="processes of each loader; 0 reads in this one (%(default)s)",
    )
    add("--batch-size", type=positive_int, default=32, help="images per batch (%(default)s)")
    add("--batches", type=positive_int, default=5, help="timed batches per round (%(default)s)")
    add("--rounds", type=positive_int, default=7, help="timed rounds (%(default)s)")
    add("--model", help="any timm model: measure its training step with and without waiting for images")
    add("--device", type=usable_device, default="cpu", help="torch device of the model, such as cuda (%(default)s)")
    add("--output", type=output_file, metavar="JSON", help="file for the figures")
    return parser


def size(text: str) -> tuple[int, int]:
    """Parses WIDTHxHEIGHT."""
    width, height = text.split("x")
    return int(width), int(height)


def write_images(folder: Path, shape: tuple[int, int], number: int) -> None:
    """Cuts JPEG files of one size out of scikit-learn's photographs."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise MissingDependencyError.of("generated files", "scikit-learn", "train") from error
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for position in range(number):
        photograph = photographs[position % len(photographs)]
        scale = min(photograph.width / shape[0], photograph.height / shape[1]) * random.uniform(0.5, 1)
        width, height = int(shape[0] * scale), int(shape[1] * scale)
        left, top = (
            int(random.integers(length + 1)) for length in (photograph.width - width, photograph.height - height)
        )
        cut = photograph.crop((left, top, left + width, top + height)).resize(shape, Image.Resampling.BICUBIC)
        cut.save(folder / f"{position:03}.jpg", quality=90)


class DomainBedImages(Dataset):
    """Files as DomainBed reads and augments them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(SIDE, scale=(0.7, 1.0)),
                transforms.RandomHorizontalFlip(),
                transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
                transforms.RandomGrayscale(),
                transforms.ToTensor(),
                transforms.Normalize(**IMAGENET),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Image.Image:
        """Decodes a file."""
        with Image.open(self.paths[index]) as image:
            return image.convert("RGB")

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.image(index)), 0


def pooled(data_dir: Path) -> FolderDomain:
    """All images below a folder as one domain, so that both loaders have the same number of processes."""
    domains = read_folder(data_dir)
    paths = [path for domain in domains for path in domain.paths]
    targets = [target for domain in domains for target in domain.targets]
    return FolderDomain("pooled", domains[0].classes, targets, paths)


def our_loader(domain: FolderDomain, args: argparse.Namespace) -> DataLoader:
    """The loader that tools/finetune.py trains from."""
    inside = Split(np.arange(len(domain)), np.arange(0))
    view = training_transform("photograph", (SIDE, SIDE), **IMAGENET)
    draws = TrainingDraws([domain], [inside], view, seed=0)
    return training_loader(draws, StepSampler([0], args.batch_size), workers=args.workers)


def domainbed_loader(images: DomainBedImages, args: argparse.Namespace) -> DataLoader:
    """DomainBed's, without an end."""
    sampler = RandomSampler(images, replacement=True, num_samples=10**9)
    return DataLoader(images, args.batch_size, sampler=sampler, num_workers=args.workers)


def rate(batches: Iterator[Any], args: argparse.Namespace) -> float:
    """Images per second over a round, after what workers had ready from before it."""
    for _ in range(2 * args.workers + 1):
        next(batches)
    return args.batch_size / seconds_of(partial(next, batches), repeats=args.batches)


def compare_rates(domain: FolderDomain, args: argparse.Namespace) -> dict[str, Any]:
    """Images per second of both loaders, and the ratio in each round."""
    ours, theirs = iter(our_loader(domain, args)), iter(domainbed_loader(DomainBedImages(domain.paths), args))
    rates = interleaved({"ours": partial(rate, ours, args), "domainbed": partial(rate, theirs, args)}, args.rounds)
    ratio = ratios(rates["ours"], rates["domainbed"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {**medians, "ratio": [min(ratio), statistics.median(ratio), max(ratio)]}


def milliseconds(act: Callable[[Any], Any], things: Sequence[Any]) -> float:
    """Mean time of an act, the best of three passes."""

    def whole() -> None:
        for thing in things:
            act(thing)

    return 1e3 * min(seconds_of(whole) for _ in range(3)) / len(things)


def compare_shares(domain: FolderDomain) -> dict[str, dict[str, float]]:
    """Milliseconds per image that decoding and transforming take, in this process."""
    view = training_transform("photograph", (SIDE, SIDE), **IMAGENET)
    theirs = DomainBedImages(domain.paths)
    positions = range(min(len(domain), 32))
    return {
        name: {
            "decode": milliseconds(source.image, positions),
            "transform": milliseconds(transform, [source.image(position) for position in positions]),
        }
        for name, source, transform in (("ours", domain, view), ("domainbed", theirs, theirs.transform))
    }


def measure_step(domain: FolderDomain, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a training step on the same batch over and over, and on what the loader brings; interleaved."""
    model = timm.create_model(args.model, num_classes=len(domain.classes), img_size=SIDE).to(args.device)
    optimizer = torch.optim.Adam(model.parameters())
    batches = (minibatches[0] for minibatches in our_loader(domain, args))
    fixed = next(batches)

    def train_on_next(source: Iterator[Any]) -> None:
        images, targets = next(source)
        step(model, optimizer, images.to(args.device), targets.to(args.device))

    def timed(source: Iterator[Any]) -> float:
        next(source)
        return 1e3 * seconds_of(partial(train_on_next, source), args.device, args.batches)

    step(model, optimizer, *(tensor.to(args.device) for tensor in fixed))
    sources = {"compute": itertools.repeat(fixed), "loaded": batches}
    times = interleaved({name: partial(timed, source) for name, source in sources.items()}, args.rounds)
    compute, loaded = (statistics.median(values) for values in times.values())
    return {"without_loader": compute, "with_loader": loaded, "waiting": max(0.0, 1 - compute / loaded)}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, targets: torch.Tensor) -> None:
    """One step of ERM, to its end."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()
    if images.device.type != "cpu":
        torch.accelerator.synchronize()


def measure(name: str, domain: FolderDomain, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one set of files; prints it."""
    row = {"files": name, **compare_rates(domain, args), "milliseconds": compare_shares(domain)}
    low, middle, high = row["ratio"]
    print(
        f"{name}: {row['ours']:.0f} images/s, DomainBed's {row['domainbed']:.0f}, "
        f"ratio {middle:.2f} ({low:.2f}-{high:.2f})"
    )
    for loader, shares in row["milliseconds"].items():
        print(f"  {loader:9} decode {shares['decode']:.2f} ms, transform {shares['transform']:.2f} ms")
    if args.model:
        times = row["step"] = measure_step(domain, args)
        print(
            f"  step of {times['without_loader']:.0f} ms, {times['with_loader']:.0f} with the loader: "
            f"{times['waiting']:.0%} of it waiting for images"
        )
    return row


def report(args: argparse.Namespace) -> None:
    """Measures, prints, writes JSON."""
    if args.model:
        check_name(args.model)
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, {args.workers} workers, batches of {args.batch_size}, {args.rounds} rounds of "
        f"{args.batches}, timm_moe_dg {timm_moe_dg.__version__}"
    )
    rows = []
    if args.data_dir:
        rows.append(measure(str(args.data_dir), pooled(args.data_dir), args))
    else:
        for shape in args.size:
            with tempfile.TemporaryDirectory() as folder:
                write_images(Path(folder, "domain", "class"), shape, args.images)
                rows.append(measure("{}x{}".format(*shape), pooled(Path(folder)), args))
    if args.output:
        settings = {"torch": torch.__version__, **{key: str(value) for key, value in vars(args).items()}}
        args.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2))


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    report(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
