"""Benchmarks: where the images lie, what was published about them, and the defaults of training."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import ArgumentError, DataError
from .bands import RGB, Bands
from .domains import DataDir, Domain, given_folder
from .readers.folders import subfolders

Hparams = Mapping[str, float | int]

# GMoE (ICLR 2023), Table 8 and appendix D.2. resnet_dropout is DomainBed's name for the rate before the classifier.
DEFAULTS: Hparams = {"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32, "resnet_dropout": 0.0}

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Attributes:
        name: The value of `--dataset`.
        reader: Opens the domains below a folder. May take the arguments `metadata_columns`, `columns` and `evaluating`.
        source: Where the images come from.
        license: License of the images.
        layout: What the data folder holds.
        domains: Names of the domains in order, by default those of `images`, empty if the folder decides.
        classes: Names of the classes in order, empty if the folder decides.
        num_classes: Number of classes, by default that of `classes`, or None if the folder decides.
        images: Images by domain as published, empty if no count is known.
        published: Published numbers of "classes" and "images" that `read` does not compare.
        aliases: Names of the folder, below the data folder, that may hold the domains. DomainBed's comes first.
        hparams: Default hyper-parameters. `batch_size` counts images per training domain and step.
        search_space: Name in `protocols.SEARCH_SPACES` of the ranges for random search.
        domains_per_step: How many training domains a step draws. None draws all.
        checkpoint_freq: Steps between evaluations.
        eval_train: Whether evaluations include the training images by default, as DomainBed's do.
        augmentation: Training augmentation, a name in `AUGMENTATIONS`.
        image_size: Side of the square input in pixels. None leaves it to the model.
        swad_hparams: Hyper-parameters that differ under stochastic weight averaging (SWAD).
        swad_checkpoint_freq: Steps between evaluations under SWAD.
        takes_metadata_columns: Whether the columns of its table can be renamed, and further ones be read as metadata.
        takes_data_dir: Whether the images are in a folder that the user names.
        takes_evaluating: Whether `reader` takes `evaluating`.
        upright: Whether the EXIF orientation of files is applied. DomainBed and WILDS do not, so that their data sets
            are read as they read them.
        shares_photographs: Whether files with the same CLASS/IMAGE in several domains show the same photograph.
        split_by_photograph: Whether these are in the same split by default.

    >>> [domain.name for domain in timm_moe_dg.data.get_benchmark("colored_digits").read(None)]
    ['+90%', '+80%', '-90%']
    """

    name: str
    reader: Callable[..., Sequence[Domain]]
    source: str
    license: str
    layout: str = "`DOMAIN/CLASS/IMAGE`"
    domains: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    num_classes: int | None = None
    images: Mapping[str, int] = field(default_factory=dict)
    published: Mapping[str, int] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    hparams: Hparams = field(default_factory=lambda: DEFAULTS)
    search_space: str = "photographs"
    domains_per_step: int | None = None
    steps: int = 5001
    checkpoint_freq: int = 300
    eval_train: bool = False
    augmentation: str = "photograph"
    image_size: int | None = None
    swad_hparams: Hparams = field(default_factory=dict)
    swad_checkpoint_freq: int = 100
    takes_metadata_columns: bool = False
    takes_data_dir: bool = True
    takes_evaluating: bool = False
    upright: bool = True
    shares_photographs: bool = False
    split_by_photograph: bool = False

    def __post_init__(self) -> None:
        # A frozen dataclass has no other way to fill in what follows from other fields
        object.__setattr__(self, "domains", self.domains or tuple(self.images))
        object.__setattr__(self, "num_classes", self.num_classes or len(self.classes) or None)

    @property
    def is_published(self) -> bool:
        """Whether somebody has published the domains or classes. Nobody has those of the user's own images."""
        return bool(self.domains or self.num_classes or self.published)

    def reported_split(self, domains: Sequence[Domain]) -> Literal["in", "whole"]:
        """Returns the part of held-out domains that is reported.

        It is the whole of the user's own images, whose domains and classes nobody has published, and the in-split of
        benchmarks and of data that set test domains apart.
        """
        return "in" if self.is_published or any(domain.role != "train" for domain in domains) else "whole"

    def read(
        self,
        data_dir: DataDir,
        metadata_columns: Sequence[str] = (),
        bands: Bands | int | Sequence[str] = RGB,
        *,
        evaluating: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> Sequence[Domain]:
        """Opens the domains and compares them with what was published.

        Other domains or another number of classes would be another task, and are a `DataError`. Another number of
        images is a warning, because partial copies exist.

        Args:
            data_dir: The folder that holds the domains, or its parent, in which it has a name in `aliases`.
            metadata_columns: Columns of the data's table to read as metadata, beside coordinates.
            bands: Number of the images' bands, or their full names. Others than three need image files.
            evaluating: Read data to evaluate a network on. The user's own may lack classes and training images then.
            columns: The user's names of columns of metadata.csv, by their usual names.
        """
        self.check_data_dir(data_dir)
        tables = {"metadata_columns": list(metadata_columns), "columns": dict(columns or {})}
        options: dict[str, Any] = {name: value for name, value in tables.items() if value}
        for name in () if self.takes_metadata_columns else options:
            remedy = f"{self.name} reads no columns of a table; use --dataset place_folder, or leave it out"
            raise ArgumentError.of(name, options[name], remedy)
        options |= {"evaluating": True} if evaluating and self.takes_evaluating else {}
        domains = self.reader(self._folder(data_dir) if self.aliases else data_dir, **options)
        self._compare(domains)
        changes: dict[str, Any] = {} if self.upright else {"upright": False}
        bands = Bands.of(bands)
        if not bands.is_rgb:
            if not all(isinstance(image, str | bytes) for domain in domains for image in domain.images[:1]):
                remedy = "leave it out, or use --dataset folder or place_folder"
                raise ArgumentError.of(*bands.option, f"images of {self.name} have {RGB} bands; {remedy}")
            changes["bands"] = bands
        return [replace(domain, **changes) for domain in domains] if changes else domains

    def check_data_dir(self, data_dir: DataDir) -> None:
        """Refuses a folder that `read` would ignore, by an `ArgumentError`."""
        if data_dir is not None and not self.takes_data_dir:
            remedy = f"{self.name} reads no folder; for images of your own give --dataset folder, or leave it out"
            raise ArgumentError.of("data_dir", str(data_dir), remedy)

    def _folder(self, data_dir: DataDir) -> Path:
        """Returns the folder of the domains: the data folder, or one below it."""
        root = given_folder(data_dir, self._layout())
        for folder in filter(Path.is_dir, (root, *(root / alias for alias in self.aliases))):
            if not {*map(plain, self.domains)}.isdisjoint(map(plain, subfolders(folder))):
                return folder
        return root  # so that the error lists its contents

    def _compare(self, domains: Sequence[Domain]) -> None:
        """Compares domains, classes and images with what was published."""
        names, classes = [domain.name for domain in domains], domains[0].classes
        if self.domains and list(map(plain, names)) != list(map(plain, self.domains)):
            remedy = f"rename or move folders until the data folder holds {self._layout()}, or use --dataset folder"
            raise DataError(f"dataset={self.name!r}: found the domains {', '.join(names)}; {remedy}")
        if self.num_classes not in (None, len(classes)):
            counts = f"expected {self.num_classes} classes and found {len(classes)} ({', '.join(classes[:5])}, ...)"
            raise DataError(f"dataset={self.name!r}: {counts}; complete the copy, or use --dataset folder for a subset")
        for name, domain in zip(self.domains, domains, strict=False):  # no names if the folder decides
            expected = self.images.get(name, len(domain))
            if len(domain) != expected:
                text = "dataset=%r: %s holds %d images where %d were published; results do not compare"
                _LOGGER.warning(text, self.name, domain.name, len(domain), expected)

    def _layout(self) -> str:
        folders = "".join(f" or {alias}/DOMAIN/CLASS/IMAGE" for alias in self.aliases[:1])
        return f"{self.layout.strip('`')}{folders} with the domains {', '.join(self.domains)}"


def plain(name: str) -> str:
    """Normalizes a folder's name, which copies spell differently: "Real World", "Real_World" or "RealWorld"."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())
