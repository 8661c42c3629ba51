"""Your own images with coordinates: a folder and its metadata.csv.

Format: columns `path` (below the folder), `label`, `lon` and `lat` (degrees; nan in both where unknown), `split`
(train, id_val, id_test, ood_val or ood_test) and `group` (such as a region; one name for all will do). Further columns
of numbers, such as the year or the sensor, are read as metadata if they are asked for.
Classes: the labels, in alphabetical order.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...errors import DataError
from ..domains import DataDir
from ..texts import Texts
from .columns import below, choice, coordinates, numeric, parsed, read_csv
from .places import PARTS, Places, PlacesDomain, domains_of

COLUMNS = ("path", "label", "lon", "lat", "split", "group")


def read_place_folder(data_dir: DataDir, metadata_columns: Sequence[str] = ()) -> list[PlacesDomain]:
    """Reads a folder with a metadata.csv; every training step draws equally from each group.

    Args:
        data_dir: The folder.
        metadata_columns: Columns of numbers that follow longitude and latitude in the domains' metadata.

    Raises:
        DataError: No folder, a column missing, a field empty or wrong, or an image that is not there; lines are named.
    """
    if data_dir is None:
        raise DataError("data_dir=None: give --data-dir, the folder that holds metadata.csv and the images it names")
    table = Path(data_dir) / "metadata.csv"
    rows = read_csv(table, COLUMNS)
    images = Texts(parsed(table, rows, "path", _existing(Path(data_dir)), "an image below the folder"))
    labels = parsed(table, rows, "label", str, "a label")
    classes = tuple(sorted(set(labels)))
    indices = {name: index for index, name in enumerate(classes)}
    return domains_of(
        Places(
            classes=classes,
            images=images,
            targets=np.array([indices[label] for label in labels]),
            metadata=np.concatenate([coordinates(table, rows), numeric(table, rows, metadata_columns)], axis=1),
            part=np.array(parsed(table, rows, "split", choice(*PARTS), f"one of {', '.join(PARTS)}")),
            group=np.array(parsed(table, rows, "group", str, "the name of a group")),
        )
    )


def _existing(folder: Path) -> Callable[[str], str]:
    place = below(folder)

    def parse(text: str) -> str:
        if not os.path.isfile(path := place(text)):
            raise ValueError(text)
        return path

    return parse
