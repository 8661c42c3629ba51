"""Data sets of the Hugging Face Hub that hold domains as a column: `--dataset hub:OWNER/NAME`.

Format: columns `image`, `domain` and `label`, as in flwrlabs/pacs, flwrlabs/office-home and wltjr1007/DomainNet.
Domains: in alphabetical order. Images: in the order of the rows, all official splits one after the other. A folder has
another order, so that runs on both compare as different trial seeds do. Everything that `datasets.load_dataset` accepts
by a single name works, including a local folder of parquet files.
"""

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import DataError, ImageReadError, needs
from ..domains import FileDomain, check_spellings, file_names
from .folders import is_hidden
from .images import Pixels, read_pixels

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
COLUMNS = ("image", "domain", "label")


@dataclass(frozen=True, eq=False)
class HubDomain(FileDomain[int]):
    """The rows of one domain: `images` are their positions in the table."""

    table: "Dataset" = field(kw_only=True, repr=False)  # the whole data set's column of images, read on demand
    roots: tuple[str, ...] = field(kw_only=True, repr=False)  # absolute folders that rows may name files in

    def pixels(self, index: int) -> Pixels:
        """Reads one image for a transform. Files outside of the data set are an `ImageReadError`."""
        row = int(self.images[index])
        stored = self.table[row]["image"] or {"path": None, "bytes": b""}
        name = stored["path"] or f"row {row} of domain {self.name}"
        if stored["bytes"] is not None:
            return read_pixels(name, file=io.BytesIO(stored["bytes"]))
        if not self._holds(name):
            remedy = "give a data set that holds its images, or --skip-unreadable"
            raise ImageReadError(f"image={name!r}: is a file of this machine and none of the data set's; {remedy}")
        return read_pixels(name)

    def content(self, index: int) -> str | bytes:
        """Returns the bytes of one image, or the path of its file if that is one of the data set's."""
        stored = self.table[int(self.images[index])]["image"] or {"path": None, "bytes": b""}
        return stored["bytes"] or (stored["path"] if self._holds(stored["path"]) else b"")

    def _holds(self, path: str | None) -> bool:
        """Whether a file belongs to the data set. One from the Hub must not read other files of this machine."""
        return path is not None and any(Path(os.path.abspath(path)).is_relative_to(root) for root in self.roots)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the names of the images, bytes (N,), and their sizes in bytes, (N,), -1 for those of other files."""
        import pyarrow.compute as pc

        column, rows = self.table.data.column("image"), np.asarray(self.images)
        paths = pc.struct_field(column, "path").take(rows).fill_null("").to_pylist()
        sizes = pc.binary_length(pc.struct_field(column, "bytes")).fill_null(-1).take(rows)
        return file_names(paths), sizes.to_numpy().astype(np.int64)


def read_hub(path: str) -> list[HubDomain]:
    """Loads a data set by OWNER/NAME or a local folder, from the cache if it is there, and divides it by domain."""
    table, sizes = _load(path)
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(f"dataset='{HUB}{path}': lacks the columns {', '.join(missing)}; has {table.column_names}")
    names, domains = _names_and_indices(path, table, sizes, "domain")
    classes, targets = _names_and_indices(path, table, sizes, "label")
    source, in_domains = f"dataset='{HUB}{path}'", [names[index] for index in domains]
    check_spellings(source, zip([classes[index] for index in targets], in_domains, strict=True))
    check_spellings(source, ((name, "this data set") for name in in_domains), "domains")
    import datasets
    import pyarrow.compute as pc
    from huggingface_hub import constants

    if not isinstance(table.features["image"], datasets.Image):
        raise DataError(f"{source}: column 'image' is {table.features['image']}; expected images")
    images = table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    # Folders of the data set's own files: the caches, and the data set itself if it is a local folder
    caches = [datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE]
    roots = tuple(map(os.path.abspath, [*caches, path] if os.path.isdir(path) else caches))
    paths = pc.struct_field(table.data.column("image"), "path").to_pylist()
    visible = np.array([not is_hidden(file or "") for file in paths], dtype=bool)
    members = {name: np.flatnonzero(visible & (domains == index)) for index, name in enumerate(names)}
    return [
        HubDomain(name, classes, targets[rows], rows, table=images, roots=roots)
        for name, rows in sorted(members.items())
        if len(rows)
    ]


def _load(path: str) -> "tuple[Dataset, dict[str, int]]":
    """All splits one after the other, and the number of rows of each."""
    with needs(f"dataset='{HUB}{path}'", "datasets", "hub-data"):
        import datasets
    try:
        splits = datasets.load_dataset(path)
        return datasets.concatenate_datasets(list(splits.values())), splits.num_rows
    # The transport's errors have other classes in each major release of the client.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"dataset='{HUB}{path}': cannot be loaded ({type(error).__name__}: {reason}); check the name and the "
            "network, or load it once where there is network and copy the cache (HF_HOME); a folder of images, with "
            "--dataset and --data-dir, needs no network"
        ) from error


def _names_and_indices(
    path: str, table: "Dataset", sizes: Mapping[str, int], column: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """A column's names in order (a ClassLabel's, otherwise the values that occur), and each row's index in them."""
    values: list[Any] = table.data.column(column).to_pylist()
    names = getattr(table.features[column], "names", None)
    places = ((split, row) for split, size in sizes.items() for row in range(size))
    for value, (split, row) in zip(values, places, strict=True):
        # Rows without a label have None, nan, an empty text, or -1 in a ClassLabel
        is_name = isinstance(value, str | int) and str(value).strip().casefold() not in ("", "nan")
        if not (isinstance(value, int) and 0 <= value < len(names) if names else is_name):
            remedy = "every row needs a name or a number; drop such rows (datasets' filter) and give the copy's folder"
            raise DataError(
                f"dataset='{HUB}{path}': column {column!r} is {value!r} in row {row} of split {split!r}; {remedy}"
            )
    if names:
        return tuple(names), np.array(values)
    distinct = sorted(set(values))
    return tuple(map(str, distinct)), np.searchsorted(distinct, values)
