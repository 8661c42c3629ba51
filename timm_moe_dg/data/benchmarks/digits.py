"""Rows of the table: digits and clothes.

Those made of scikit-learn's digits need no download. Those from MNIST's and Fashion-MNIST's files are DomainBed's: its
learning rate, batch, number of steps and evaluations, no augmentation. Their images have 28 x 28 pixels, which patches
of 16 do not divide: give `--model-kwargs patch_size=7`, or 4 or 14, or `--img-size 32`.
"""

from dataclasses import replace

from .. import readers
from ..readers.digits import (
    ANGLES,
    CLASSES,
    COLOR_NOISE,
    COLORED_CLASSES,
    STORED_SIZE,
    colored_digits,
    rotated_digits,
)
from ..readers.geo_digits import CONTINENTS, geo_digits
from ..readers.idx import FASHION_MNIST, MNIST, SIDE, IdxRelease
from .benchmark import DEFAULTS, Benchmark

_DIGITS = "sklearn.datasets.load_digits (UCI Optical Recognition of Handwritten Digits, test part)"
_HPARAMS = {**DEFAULTS, "lr": 3e-4, "batch_size": 16}

_IMAGES = 70_000


def _dealt(domains: tuple[str, ...]) -> dict[str, int]:
    """How many images each domain gets when they are dealt out in turn."""
    return {name: len(range(position, _IMAGES, len(domains))) for position, name in enumerate(domains)}


def _domainbed(release: IdxRelease, prefix: str, source: str, license: str) -> tuple[Benchmark, Benchmark]:
    """DomainBed's two benchmarks from one set of files."""
    angles, colors = tuple(map(str, ANGLES)), tuple(COLOR_NOISE)
    rotated = Benchmark(
        name=f"Rotated{prefix}",
        reader=lambda data_dir: readers.read_rotated(data_dir, release),
        domains=angles,
        classes=release.classes,
        num_classes=len(release.classes),
        images=_dealt(angles),
        hparams={**DEFAULTS, "lr": 1e-3, "batch_size": 64},
        search_space="small_images",
        checkpoint_freq=100,
        augmentation="none",
        image_size=SIDE,
        eval_train=True,
        source=source,
        license=license,
    )
    colored = replace(
        rotated,
        name=f"Colored{prefix}",
        reader=lambda data_dir: readers.read_colored(data_dir, release),
        domains=colors,
        classes=COLORED_CLASSES,
        num_classes=len(COLORED_CLASSES),
        images=_dealt(colors),
    )
    return rotated, colored


DIGIT_ROWS = (
    Benchmark(
        name="rotated_digits",
        reader=lambda data_dir: rotated_digits(),
        domains=tuple(f"rot_{angle}" for angle in ANGLES),
        classes=CLASSES,
        num_classes=len(CLASSES),
        hparams=_HPARAMS,
        search_space="digits",
        steps=501,
        checkpoint_freq=100,
        augmentation="digit",
        image_size=STORED_SIZE,
        source=_DIGITS,
        license="CC BY 4.0",
    ),
    Benchmark(
        name="colored_digits",
        reader=lambda data_dir: colored_digits(),
        domains=tuple(COLOR_NOISE),
        classes=COLORED_CLASSES,
        num_classes=len(COLORED_CLASSES),
        hparams=_HPARAMS,
        search_space="digits",
        steps=501,
        checkpoint_freq=100,
        augmentation="none",
        image_size=STORED_SIZE,
        source=_DIGITS,
        license="CC BY 4.0",
    ),
    Benchmark(
        name="geo_digits",
        reader=lambda data_dir: geo_digits(),
        classes=CLASSES,
        num_classes=len(CLASSES),
        hparams={**_HPARAMS, "lr": 1e-3},
        search_space="digits",
        steps=601,
        checkpoint_freq=200,
        augmentation="digit",
        image_size=STORED_SIZE,
        source=f"{_DIGITS}, placed on {len(CONTINENTS)} continents",
        license="CC BY 4.0",
    ),
    *_domainbed(
        MNIST, "MNIST", "LeCun et al., Gradient-based learning, 1998; as DomainBed shares it out", "CC BY-SA 3.0"
    ),
    *_domainbed(FASHION_MNIST, "FashionMNIST", "Xiao et al., 2017; shared out as DomainBed does MNIST", "MIT"),
)
