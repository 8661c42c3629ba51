"""Data sets of the Hugging Face Hub that hold domains as a column: `--dataset hub:OWNER/NAME`.

Format: columns `image`, `domain` and `label`, such as flwrlabs/pacs, flwrlabs/office-home and wltjr1007/DomainNet have.
Domains: in alphabetical order, as those of a folder. Images: in the order of the rows, all official splits one after
the other, which is not that of a folder; runs on it compare with runs on a folder as different trial seeds do.
Anything that `datasets.load_dataset` takes by one name will do, a local folder of parquet files among them.
"""

import io
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ...errors import DataError, ImageReadError, MissingDependencyError
from ..domains import Domain
from .images import read_image

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
COLUMNS = ("image", "domain", "label")


@dataclass(frozen=True, eq=False)
class HubDomain(Domain[int]):
    """The rows of one domain: `images` are their positions in the table.

    Attributes:
        table: The column of images of the whole data set; they are read from it when asked for.
        roots: Absolute folders below which files lie that rows may name; where a row holds its image there is none.
    """

    table: "Dataset" = field(kw_only=True, repr=False)
    roots: tuple[str, ...] = field(kw_only=True, repr=False)

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The image cannot be decoded, or is a file that is none of the data set's.
        """
        row = self.images[index]
        stored = self.table[row]["image"] or {"path": None, "bytes": b""}
        name = stored["path"] or f"row {row} of domain {self.name}"
        if stored["bytes"] is not None:
            return read_image(name, io.BytesIO(stored["bytes"]))
        if not any(Path(os.path.abspath(name)).is_relative_to(root) for root in self.roots):
            remedy = "give a data set that holds its images, or --skip-unreadable"
            raise ImageReadError(f"image={name!r}: is a file of this machine and none of the data set's; {remedy}")
        return read_image(name)


def read_hub(path: str) -> list[HubDomain]:
    """Loads a data set, from the cache where it is there, and divides it by domain.

    Args:
        path: OWNER/NAME, or a local folder.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        DataError: There is no such data set or no network, or a column is missing or of the wrong kind.
    """
    table = _load(path)
    lacking = [name for name in COLUMNS if name not in table.column_names]
    if lacking:
        raise DataError(f"dataset='{HUB}{path}': lacks the columns {', '.join(lacking)}; has {table.column_names}")
    names, domains = _named(path, table, "domain")
    classes, targets = _named(path, table, "label")
    images, roots = _undecoded(path, table), _roots(path)
    members = {name: np.flatnonzero(domains == index) for index, name in enumerate(names)}
    return [
        HubDomain(name, classes, targets[rows], array("q", rows.tolist()), table=images, roots=roots)
        for name, rows in sorted(members.items())
        if len(rows)
    ]


def _load(path: str) -> "Dataset":
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError.of(f"dataset='{HUB}{path}'", "datasets", "hub-data") from error
    try:
        splits = datasets.load_dataset(path)
        return datasets.concatenate_datasets(list(splits.values()))
    except Exception as error:  # of the transport too, which has other classes in each major release of the client
        reason = " ".join(str(error).split())
        raise DataError(
            f"dataset='{HUB}{path}': cannot be loaded ({type(error).__name__}: {reason}); check the name and the "
            "network, or load it once where there is network and copy the cache (HF_HOME); a folder of images, with "
            "--dataset and --data-dir, needs no network"
        ) from error


def _named(path: str, table: "Dataset", column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """A column's names in order, and which of them each row has: a ClassLabel's own, otherwise those that occur."""
    values = table.data.column(column).to_pylist()
    names = getattr(table.features[column], "names", None)
    if names:
        return tuple(names), np.array(values)
    if any(not isinstance(value, str | int) for value in values):
        raise DataError(f"dataset='{HUB}{path}': column {column!r} must hold names or numbers, one in every row")
    found = sorted(set(values))
    return tuple(map(str, found)), np.searchsorted(found, values)


def _roots(path: str) -> tuple[str, ...]:
    """Folders that a data set's own files lie in: the caches, and itself where it is a folder of this machine."""
    import datasets
    from huggingface_hub import constants

    caches = (datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return tuple(os.path.abspath(root) for root in (*caches, *([path] if os.path.isdir(path) else [])))


def _undecoded(path: str, table: "Dataset") -> "Dataset":
    """The images' column alone, as the bytes or paths that it stores."""
    import datasets

    if not isinstance(table.features["image"], datasets.Image):
        raise DataError(f"dataset='{HUB}{path}': column 'image' is {table.features['image']}; expected images")
    return table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
