"""The benchmarks, as a table. A new benchmark is a new row; nothing reads an image before a row's `read` is called."""

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ArgumentError
from .benchmark import Benchmark
from .digit_rows import DIGIT_ROWS
from .hub_data import HUB, hub_benchmark
from .photograph_rows import PHOTOGRAPH_ROWS
from .place_rows import PLACE_ROWS

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {row.name: row for row in (*DIGIT_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)}
)


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
