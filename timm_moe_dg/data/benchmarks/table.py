"""The table of benchmarks by name.

Other packages add rows with `register_benchmark`. Images are read only when a row's `read` is called.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import ArgumentError
from ..domains import DataDir
from ..readers.hub_data import HUB, HubDomain, read_hub
from .benchmark import Benchmark
from .digit_rows import DIGIT_ROWS
from .photograph_rows import PHOTOGRAPH_ROWS
from .place_rows import PLACE_ROWS

_ROWS: dict[str, Benchmark] = {row.name: row for row in (*DIGIT_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)}
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(_ROWS)


def register_benchmark(row: Benchmark) -> Benchmark:
    """Adds a row to `BENCHMARKS`. Call it in the module that defines the row.

    Raises:
        ArgumentError: The name is empty, holds a slash or a colon, or belongs to another row.
    """
    if not row.name or not set("/\\:").isdisjoint(row.name):
        raise ArgumentError.of(
            "name", row.name, "give a name without slashes and colons; run folders are named after it"
        )
    # Registering the same row again is no error.
    if _ROWS.setdefault(row.name, row) is not row:
        raise ArgumentError.of("name", row.name, "is the name of another benchmark; choose another")
    return row


def get_benchmark(name: str) -> Benchmark:
    """Looks up a benchmark, or makes one for a data set of the Hub.

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
    """Makes a benchmark of a data set of the Hub, which is downloaded when the benchmark is read.

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
