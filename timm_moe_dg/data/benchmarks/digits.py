"""Rows of the table: benchmarks made of scikit-learn's digits, which need no download."""

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
from .benchmark import DEFAULTS, Benchmark

_DIGITS = "sklearn.datasets.load_digits (UCI Optical Recognition of Handwritten Digits, test part)"
_HPARAMS = {**DEFAULTS, "lr": 3e-4, "batch_size": 16}

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
)
