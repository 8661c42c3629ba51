"""The benchmarks, as a table: what each is made of and how it is trained by default.

A new benchmark is a new row. Nothing here reads an image before a row's `read` is called.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from ..errors import ArgumentError, DataError
from .colored_digits import CLASSES as COLORED_CLASSES
from .colored_digits import COLOR_NOISE, colored_digits
from .digits import ANGLES, CLASSES, STORED_SIZE, rotated_digits
from .domains import Domain
from .folders import read_folder
from .geo_digits import CONTINENTS, geo_digits
from .place_folder import read_place_folder
from .wilds import read_fmow, read_fmow_lao, read_iwildcam

Reader = Callable[[str | os.PathLike[str] | None], Sequence[Domain]]
Hparams = Mapping[str, float | int]


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Attributes:
        name: What `--dataset` calls it.
        read: Opens the domains below a data folder; benchmarks that ship with a package ignore the folder.
        domains: Names of the domains in order; empty where the folder decides.
        classes: Names of the classes in order; empty where the folder decides.
        hparams: Default learning rate, weight decay and batch size (images per training domain and step).
        search_space: Ranges from which other hyper-parameters are drawn; a name in `protocols.SEARCH_SPACES`.
        steps: Default number of training steps.
        checkpoint_freq: Steps from one evaluation to the next.
        augmentation: Training augmentation, a name in `AUGMENTATIONS`.
        image_size: Side of the square input in pixels; None leaves it to the model.
        source: Where the images come from.
        licence: Their licence.
        aliases: Names of the folder, below the data folder, that may hold the domains; DomainBed's comes first.
        num_classes: Expected number of classes; None where the folder decides.
        images: Expected number of images by domain, as published; empty where it is not known.
        swad_hparams: What stochastic weight averaging (SWAD) does differently on this benchmark.
        swad_checkpoint_freq: Steps from one evaluation to the next under SWAD.
    """

    name: str
    read: Reader
    hparams: Hparams
    source: str
    licence: str
    domains: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    search_space: str = "photographs"
    steps: int = 5001
    checkpoint_freq: int = 300
    augmentation: str = "photograph"
    image_size: int | None = None
    aliases: tuple[str, ...] = ()
    num_classes: int | None = None
    images: Mapping[str, int] = field(default_factory=dict)
    swad_hparams: Hparams = field(default_factory=dict)
    swad_checkpoint_freq: int = 100


def get_benchmark(name: str) -> Benchmark:
    """Looks up a row.

    Raises:
        ArgumentError: There is no such benchmark.
    """
    if name not in BENCHMARKS:
        raise ArgumentError.of("dataset", name, f"choose from {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def _read_any_folder(data_dir: str | os.PathLike[str] | None) -> Sequence[Domain]:
    if data_dir is None:
        raise DataError("data_dir=None: give --data-dir, the folder that holds DOMAIN/CLASS/IMAGE")
    return read_folder(data_dir)


_WILDS = {"lr": 1e-4, "weight_decay": 0.0, "batch_size": 64}

_ROWS = (
    Benchmark(
        name="rotated_digits",
        read=lambda data_dir: rotated_digits(),
        domains=tuple(f"rot_{angle}" for angle in ANGLES),
        classes=CLASSES,
        hparams={"lr": 3e-4, "weight_decay": 0.0, "batch_size": 16},
        search_space="digits",
        steps=501,
        checkpoint_freq=100,
        augmentation="digit",
        image_size=STORED_SIZE,
        source="sklearn.datasets.load_digits (UCI Optical Recognition of Handwritten Digits, test part)",
        licence="CC BY 4.0",
    ),
    Benchmark(
        name="colored_digits",
        read=lambda data_dir: colored_digits(),
        domains=tuple(COLOR_NOISE),
        classes=COLORED_CLASSES,
        hparams={"lr": 3e-4, "weight_decay": 0.0, "batch_size": 16},
        search_space="digits",
        steps=501,
        checkpoint_freq=100,
        augmentation="none",
        image_size=STORED_SIZE,
        source="sklearn.datasets.load_digits (UCI Optical Recognition of Handwritten Digits, test part)",
        licence="CC BY 4.0",
    ),
    Benchmark(
        name="folder",
        read=_read_any_folder,
        hparams={"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32},
        source="your own images, laid out as DOMAIN/CLASS/IMAGE",
        licence="that of your images",
    ),
    Benchmark(
        name="geo_digits",
        read=lambda data_dir: geo_digits(),
        classes=CLASSES,
        hparams={"lr": 1e-3, "weight_decay": 0.0, "batch_size": 16},
        search_space="digits",
        steps=601,
        checkpoint_freq=200,
        augmentation="digit",
        image_size=STORED_SIZE,
        source=f"sklearn.datasets.load_digits, placed on {len(CONTINENTS)} continents",
        licence="CC BY 4.0",
    ),
    Benchmark(
        name="place_folder",
        read=read_place_folder,
        hparams={"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32},
        source="your own images, with a metadata.csv of path, label, lon, lat, split, group",
        licence="that of your images",
    ),
    Benchmark(
        name="FMoW",
        read=read_fmow,
        hparams=_WILDS,
        steps=60_001,
        checkpoint_freq=2000,
        source="WILDS fmow_v1.1, official split by time, all regions pooled in training",
        licence="FMoW Challenge Public License",
    ),
    Benchmark(
        name="FMoW_regions",
        read=partial(read_fmow, pooled=False),
        hparams={**_WILDS, "batch_size": 32},
        steps=60_001,
        checkpoint_freq=2000,
        source="WILDS fmow_v1.1, official split by time, every step draws equally from each region",
        licence="FMoW Challenge Public License",
    ),
    Benchmark(
        name="FMoW_LAO",
        read=read_fmow_lao,
        hparams=_WILDS,
        steps=60_001,
        checkpoint_freq=2000,
        source="WILDS fmow_v1.1 without Asia, which is the test",
        licence="FMoW Challenge Public License",
    ),
    Benchmark(
        name="iWildCam",
        read=read_iwildcam,
        hparams={"lr": 3e-5, "weight_decay": 0.0, "batch_size": 16},
        steps=97_001,
        checkpoint_freq=5000,
        image_size=448,
        source="WILDS iwildcam_v2.0, official split by camera trap",
        licence="CDLA-Permissive-1.0",
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({row.name: row for row in _ROWS})
