"""Data sets of the Hugging Face Hub that hold domains as a column: `--dataset hub:OWNER/NAME`.

Format: columns `image`, `domain` and `label`, such as flwrlabs/pacs, flwrlabs/office-home and wltjr1007/DomainNet have.
Domains: in alphabetical order, as those of a folder. Images: in the order of the rows, all official splits one after
the other, which is not that of a folder; runs on it compare with runs on a folder as different trial seeds do.
Anything that `datasets.load_dataset` takes by one name will do, a local folder of parquet files among them.
"""

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image

from ...errors import DataError, MissingDependencyError
from .folders import read_image

HUB = "hub:"
COLUMNS = ("image", "domain", "label")


@dataclass(frozen=True)
class HubDomain:
    """The rows of one domain.

    Attributes:
        name: The domain's name.
        classes: Names of the labels.
        targets: One class index per image.
        rows: The images' positions in the table.
        table: The whole data set; images are read from it when asked for.
    """

    name: str
    classes: tuple[str, ...]
    targets: Sequence[int] = field(repr=False)
    rows: Sequence[int] = field(repr=False)
    table: Any = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def image(self, index: int) -> Image.Image:
        """Reads one image as RGB.

        Raises:
            ImageReadError: The image cannot be decoded.
        """
        row = self.rows[index]
        stored = self.table[row]["image"]
        name = stored["path"] or f"row {row} of domain {self.name}"
        return read_image(name, io.BytesIO(stored["bytes"]) if stored["bytes"] is not None else None)

    def without(self, positions: Collection[int]) -> "HubDomain":
        """Returns this domain without the images at some positions."""
        kept = [position for position in range(len(self)) if position not in positions]
        targets = [self.targets[position] for position in kept]
        return replace(self, targets=targets, rows=[self.rows[position] for position in kept])


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
    images = _undecoded(path, table)
    members = {name: np.flatnonzero(domains == index) for index, name in enumerate(names)}
    return [
        HubDomain(name, classes, targets[rows].tolist(), rows.tolist(), images)
        for name, rows in sorted(members.items())
        if len(rows)
    ]


def _load(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError.of(f"dataset='{HUB}{path}'", "datasets", "hub-data") from error
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        splits = datasets.load_dataset(path)
        return datasets.concatenate_datasets(list(splits.values()))
    except (OSError, ValueError, RuntimeError, HTTPError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"dataset='{HUB}{path}': cannot be loaded ({type(error).__name__}: {reason}); check the name and the "
            "network, or load it once where there is network and copy the cache (HF_HOME); a folder of images, with "
            "--dataset and --data-dir, needs no network"
        ) from error


def _named(path: str, table: Any, column: str) -> tuple[tuple[str, ...], np.ndarray]:
    """A column's names in order, and which of them each row has: a ClassLabel's own, otherwise those that occur."""
    values = table.data.column(column).to_pylist()
    names = getattr(table.features[column], "names", None)
    if names:
        return tuple(names), np.array(values)
    if any(not isinstance(value, str | int) for value in values):
        raise DataError(f"dataset='{HUB}{path}': column {column!r} must hold names or numbers, one in every row")
    found = sorted(set(values))
    return tuple(map(str, found)), np.searchsorted(found, values)


def _undecoded(path: str, table: Any) -> Any:
    """The images' column alone, as the bytes or paths that it stores."""
    import datasets

    if not isinstance(table.features["image"], datasets.Image):
        raise DataError(f"dataset='{HUB}{path}': column 'image' is {table.features['image']}; expected images")
    return table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
