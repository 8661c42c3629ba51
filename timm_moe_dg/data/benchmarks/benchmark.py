"""What a benchmark is: where its images lie, what should be found there, and how it is trained by default."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ArgumentError, DataError
from ..band_domains import with_bands
from ..domains import DataDir, Domain
from ..pixels import RGB
from ..readers.images import subfolders

Hparams = Mapping[str, float | int]

# GMoE (ICLR 2023), Table 8 and appendix D.2, where a benchmark does not say otherwise; resnet_dropout is DomainBed's
# name for the rate before the classifier
DEFAULTS: Hparams = {"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32, "resnet_dropout": 0.0}

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Attributes:
        name: What `--dataset` calls it.
        reader: Opens the domains below a folder; those of benchmarks that ship with a package ignore it. It has a
            second argument, `metadata_columns`, where the benchmark takes them.
        source: Where the images come from.
        license: Their license.
        domains: Names of the domains in order; empty where the folder decides.
        classes: Names of the classes in order; empty where the folder decides.
        num_classes: Their number; None where the folder decides.
        images: Images by domain as published; empty where no count is known.
        aliases: Names of the folder, below the data folder, that may hold the domains; DomainBed's comes first.
        hparams: Defaults of the hyper-parameters; a batch is as many images per training domain and step.
        search_space: Ranges from which other hyper-parameters are drawn; a name in `protocols.SEARCH_SPACES`.
        domains_per_step: How many training domains a step draws, where there are too many to have each in every step;
            None has them all.
        steps: Default number of training steps.
        checkpoint_freq: Steps from one evaluation to the next.
        eval_train: Whether evaluations look at the images that are trained on too, as DomainBed's do, by default.
        augmentation: Training augmentation, a name in `AUGMENTATIONS`.
        image_size: Side of the square input in pixels; None leaves it to the model.
        swad_hparams: What stochastic weight averaging (SWAD) does differently on this benchmark.
        swad_checkpoint_freq: Steps from one evaluation to the next under SWAD.
        takes_metadata_columns: Whether further columns of its table can be read as metadata.
    """

    name: str
    reader: Callable[..., Sequence[Domain]]
    source: str
    license: str
    domains: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    num_classes: int | None = None
    images: Mapping[str, int] = field(default_factory=dict)
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

    def read(self, data_dir: DataDir, metadata_columns: Sequence[str] = (), in_chans: int = RGB) -> Sequence[Domain]:
        """Opens the domains and compares them with what was published.

        Other domains, or another number of classes, make another task, and are an error. Another number of images is a
        warning: partial copies exist, and results on them are for their owner to judge.

        Args:
            data_dir: The folder that holds the domains, or that of all data sets, in which this one's has a name in
                `aliases`.
            metadata_columns: Columns of the data's table to read as metadata, beside coordinates.
            in_chans: Bands of the images; other than three are read from files alone, see `data.bands`.

        Raises:
            ArgumentError: The benchmark has no such columns, or no images of other bands.
            DataError: There is no such folder, or what it holds differs; the message says what was expected and found.
        """
        if metadata_columns and not self.takes_metadata_columns:
            remedy = f"{self.name} has no table of metadata columns; use --dataset place_folder, or leave it out"
            raise ArgumentError.of("metadata_columns", list(metadata_columns), remedy)
        further = {"metadata_columns": metadata_columns} if metadata_columns else {}
        domains = self.reader(self._folder(data_dir) if self.aliases else data_dir, **further)
        self._compare_domains([domain.name for domain in domains])
        self._compare_classes(domains)
        self._compare_images(domains)
        return with_bands(domains, in_chans, self.name)

    def _folder(self, data_dir: DataDir) -> Path:
        if data_dir is None:
            raise DataError(f"data_dir=None: {self.name} needs --data-dir, the folder that holds {self._layout()}")
        root = Path(data_dir)
        if not root.is_dir():
            raise DataError(f"data_dir={str(root)!r}: no such folder; give the one that holds {self._layout()}")
        candidates = [root, *(root / alias for alias in self.aliases)]
        return next((folder for folder in candidates if self._holds_a_domain(folder)), root)

    def _holds_a_domain(self, folder: Path) -> bool:
        names = set(map(plain, subfolders(folder))) if folder.is_dir() else set()
        return not names.isdisjoint(map(plain, self.domains))

    def _compare_domains(self, found: Sequence[str]) -> None:
        if not self.domains or list(map(plain, found)) == list(map(plain, self.domains)):
            return
        expected, actual = Counter(map(plain, self.domains)), Counter(map(plain, found))
        lacking = [name for name in self.domains if not actual[plain(name)]]
        extra = [name for name in found if not expected[plain(name)]]
        differences = [f"{word} {', '.join(names)}" for word, names in (("lacks", lacking), ("has", extra)) if names]
        raise DataError(
            f"dataset={self.name!r}: the data folder {' and '.join(differences) or 'has another order'}; expected the "
            f"domains {', '.join(self.domains)} and found {', '.join(found)}; rename or move folders until it holds "
            f"{self._layout()}, or use --dataset folder for domains of your own"
        )

    def _compare_classes(self, domains: Sequence[Domain]) -> None:
        found = len(domains[0].classes)
        if self.num_classes not in (None, found):
            raise DataError(
                f"dataset={self.name!r}: expected {self.num_classes} classes and found {found} "
                f"({', '.join(domains[0].classes[:5])}, ...); complete the copy, or use --dataset folder for a subset"
            )

    def _compare_images(self, domains: Sequence[Domain]) -> None:
        for name, domain in zip(self.domains, domains, strict=False):  # in the same order; none where any will do
            expected = self.images.get(name, len(domain))
            if len(domain) != expected:
                _LOGGER.warning(
                    "dataset=%r: %s holds %d images where %d were published; results do not compare",
                    *(self.name, domain.name, len(domain), expected),
                )

    def _layout(self) -> str:
        folders = " or ".join(f"{alias}/DOMAIN/CLASS/IMAGE" for alias in self.aliases[:1])
        return f"DOMAIN/CLASS/IMAGE or {folders} with the domains {', '.join(self.domains)}"


def plain(name: str) -> str:
    """A folder's name as copies agree on it: "Real World", "Real_World" and "RealWorld" are one."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())
