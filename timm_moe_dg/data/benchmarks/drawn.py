"""Rows of the table: benchmarks that the package draws itself."""

from ..readers.sprites import ANGLES, CLASSES, SIZE, sprites
from .benchmark import DEFAULTS, Benchmark

DRAWN_ROWS = (
    Benchmark(
        name="sprites",
        reader=lambda data_dir: sprites(),
        domains=tuple(ANGLES),
        classes=CLASSES,
        num_classes=len(CLASSES),
        hparams={**DEFAULTS, "lr": 2e-3, "batch_size": 8},
        search_space="digits",
        steps=801,
        checkpoint_freq=200,
        augmentation="none",
        image_size=SIZE,
        source="drawn by this package",
        license="Apache-2.0",
    ),
)
