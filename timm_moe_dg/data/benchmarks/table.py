"""The table of benchmarks by name. Images are read only when a row's `read` is called."""

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import ArgumentError, choices
from ..readers.hub_data import HUB, read_hub
from .benchmark import Benchmark
from .digit_rows import DIGIT_ROWS
from .photograph_rows import PHOTOGRAPH_ROWS
from .place_rows import PLACE_ROWS

_ROWS: dict[str, Benchmark] = {row.name: row for row in (*DIGIT_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)}
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(_ROWS)


def register_benchmark(row: Benchmark) -> Benchmark:
    """Adds a row to `BENCHMARKS`, in the module that defines it. Its name has no slash or colon, and is not taken.

    >>> from timm_moe_dg.data import Benchmark, read_folder, register_benchmark
    >>> row = register_benchmark(Benchmark(name="mine", reader=read_folder, source="my camera", license="mine"))
    """
    if not row.name or not set("/\\:").isdisjoint(row.name):
        remedy = "give a name without slashes and colons; run folders are named after it"
        raise ArgumentError.of("name", row.name, remedy)
    # Registering the same row again is no error.
    if _ROWS.setdefault(row.name, row) is not row:
        raise ArgumentError.of("name", row.name, "is the name of another benchmark; choose another")
    return row


def get_benchmark(name: str) -> Benchmark:
    """Looks up a name in `BENCHMARKS`, or makes a benchmark of hub:OWNER/NAME, which is downloaded when it is read."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    path = name.removeprefix(HUB)
    if not path:
        raise ArgumentError.of("dataset", name, f"give {HUB}OWNER/NAME, such as {HUB}flwrlabs/pacs")
    if path == name:
        raise ArgumentError.of("dataset", name, choices([*BENCHMARKS, f"{HUB}OWNER/NAME"]))
    source = f"the Hub's data set {path}"
    return Benchmark(
        name=name, reader=lambda data_dir: read_hub(path), source=source, license="see its card", takes_data_dir=False
    )
