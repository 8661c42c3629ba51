"""Benchmarks of small images: digits, clothes and drawn animals.

Those made of scikit-learn's digits and the sprites need no download. Those from MNIST's and Fashion-MNIST's files are
DomainBed's, with its learning rate, batch, numbers of steps and evaluations, and no augmentation. Their images have
28 x 28 pixels, which patches of 16 do not divide: give `--model-kwargs patch_size=7`, or 4 or 14, or `--img-size 32`.
"""

from dataclasses import replace
from functools import partial

from ..readers import digits, mnist
from ..readers.mnist import FASHION_MNIST, MNIST, IdxRelease
from ..readers.sprites import ANGLES as SPRITE_ANGLES
from ..readers.sprites import CLASSES as SPRITE_CLASSES
from ..readers.sprites import SIZE as SPRITE_SIZE
from ..readers.sprites import sprites
from .benchmark import DEFAULTS, Benchmark

_DIGITS = "scikit-learn's load_digits (UCI, test part)"
_HPARAMS = {**DEFAULTS, "lr": 3e-4, "batch_size": 16}


def _images_dealt_in_turn(domains: tuple[str, ...]) -> dict[str, int]:
    # MNIST and Fashion-MNIST have 70,000 images each.
    return {name: len(range(position, 70_000, len(domains))) for position, name in enumerate(domains)}


def _domainbed(release: IdxRelease, prefix: str, source: str, license: str) -> tuple[Benchmark, Benchmark]:
    """DomainBed's two benchmarks from one set of files."""
    angles, colors = tuple(map(str, digits.ANGLES)), tuple(digits.COLOR_NOISE)
    rotated = Benchmark(
        name=f"Rotated{prefix}",
        reader=lambda data_dir: mnist.read_rotated(data_dir, release),
        domains=angles,
        classes=release.classes,
        num_classes=len(release.classes),
        images=_images_dealt_in_turn(angles),
        hparams={**DEFAULTS, "lr": 1e-3, "batch_size": 64},
        search_space="small_images",
        checkpoint_freq=100,
        augmentation="none",
        image_size=mnist.SIDE,
        eval_train=True,
        source=source,
        license=license,
        layout="four IDX files",
    )
    colored = replace(
        rotated,
        name=f"Colored{prefix}",
        reader=lambda data_dir: mnist.read_colored(data_dir, release),
        domains=colors,
        classes=digits.COLORED_CLASSES,
        num_classes=len(digits.COLORED_CLASSES),
        images=_images_dealt_in_turn(colors),
    )
    return rotated, colored


_handwritten = partial(
    Benchmark,
    classes=digits.CLASSES,
    num_classes=len(digits.CLASSES),
    hparams=_HPARAMS,
    search_space="digits",
    steps=501,
    checkpoint_freq=100,
    augmentation="digit",
    image_size=digits.STORED_SIZE,
    source=_DIGITS,
    license="CC BY 4.0",
    layout="no folder",
    takes_data_dir=False,
)

DIGIT_ROWS = (
    _handwritten(
        name="rotated_digits",
        reader=lambda data_dir: digits.rotated_digits(),
        domains=tuple(f"rot_{angle}" for angle in digits.ANGLES),
    ),
    _handwritten(
        name="colored_digits",
        reader=lambda data_dir: digits.colored_digits(),
        domains=tuple(digits.COLOR_NOISE),
        classes=digits.COLORED_CLASSES,
        num_classes=len(digits.COLORED_CLASSES),
        augmentation="none",
    ),
    _handwritten(
        name="geo_digits",
        reader=lambda data_dir: digits.geo_digits(),
        hparams={**_HPARAMS, "lr": 1e-3},
        steps=601,
        checkpoint_freq=200,
        source=f"{_DIGITS}, placed on {len(digits.CONTINENTS)} continents",
    ),
    Benchmark(
        name="sprites",
        reader=lambda data_dir: sprites(),
        domains=tuple(SPRITE_ANGLES),
        classes=SPRITE_CLASSES,
        num_classes=len(SPRITE_CLASSES),
        hparams={**DEFAULTS, "lr": 2e-3, "batch_size": 8},
        search_space="digits",
        steps=801,
        checkpoint_freq=200,
        augmentation="none",
        image_size=SPRITE_SIZE,
        source="drawn by this package",
        license="Apache-2.0",
        layout="no folder",
        takes_data_dir=False,
    ),
    *_domainbed(MNIST, "MNIST", "LeCun et al., 1998, divided as in DomainBed", "CC BY-SA 3.0"),
    *_domainbed(FASHION_MNIST, "FashionMNIST", "Xiao et al., 2017, divided as in DomainBed", "MIT"),
)
