"""The benchmarks, as a table. A new benchmark is a new row; nothing reads an image before a row's `read` is called.

Rows of this package are listed here; those of other packages come by `register_benchmark`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import ArgumentError
from ..domains import DataDir
from ..readers.hub_data import HUB, HubDomain, read_hub
from .benchmark import Benchmark
from .digits import DIGIT_ROWS
from .drawn import DRAWN_ROWS
from .photographs import PHOTOGRAPH_ROWS
from .places import PLACE_ROWS

_ROWS: dict[str, Benchmark] = {row.name: row for row in (*DIGIT_ROWS, *DRAWN_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)}
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(_ROWS)


def register_benchmark(row: Benchmark) -> Benchmark:
    """Adds a row to `BENCHMARKS`, so that it is found by its name; to be called where the row is defined.

    Raises:
        ArgumentError: The name is empty, holds what a path or the Hub's names hold, or is that of another row.
    """
    if not row.name or not set("/\\:").isdisjoint(row.name):
        raise ArgumentError.of("name", row.name, "give a name without slashes and colons; runs are named after it")
    if _ROWS.setdefault(row.name, row) is not row:
        raise ArgumentError.of("name", row.name, "is that of another benchmark; choose a name of its own")
    return row


def get_benchmark(name: str) -> Benchmark:
    """Looks up a row, or makes one for a data set of the Hub.

    Args:
        name: A name in `BENCHMARKS`, or hub:OWNER/NAME.

    Raises:
        ArgumentError: There is no such benchmark.
    """
    if name.startswith(HUB):
        return hub_benchmark(name)
    if name not in BENCHMARKS:
        raise ArgumentError.of("dataset", name, f"choose from {', '.join(BENCHMARKS)}, or {HUB}OWNER/NAME")
    return BENCHMARKS[name]


def hub_benchmark(name: str) -> Benchmark:
    """Makes a row of the table of benchmarks; nothing is downloaded before it is read.

    Args:
        name: hub:OWNER/NAME.

    Raises:
        ArgumentError: Nothing follows the colon.
    """
    path = name.removeprefix(HUB)
    if not path:
        raise ArgumentError.of("dataset", name, f"give {HUB}OWNER/NAME, such as {HUB}flwrlabs/pacs")

    def read(data_dir: DataDir) -> list[HubDomain]:
        return read_hub(path)

    return Benchmark(name=name, reader=read, source=f"the Hub's data set {path}", license="see its card")
