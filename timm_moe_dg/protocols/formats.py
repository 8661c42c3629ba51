"""The format of what a run writes down: a number and versions in args.yaml, records and checkpoints."""

import reprlib
from pathlib import Path

import timm
import torch

from .. import __version__
from ..cli.arguments import read_yaml
from ..cli.typed import fits, type_name
from ..errors import ArgumentError, FormatError
from .options import ONCE, TYPES, Arguments, by_today_s_names, having

FORMAT = 1  # raised when what was written before cannot be read any more; 0: not numbered yet, read as well


def stamp() -> dict[str, object]:
    """Returns the format number, and the versions that a result may depend on."""
    versions = {"torch": str(torch.__version__), "timm": timm.__version__, "timm_moe_dg": __version__}
    return {"format": FORMAT, "versions": versions}


def check_format(stamped: Arguments, source: str) -> None:
    """Makes sure that what was written down can be read.

    Args:
        stamped: Has what `stamp` returned when it was written, or is older than that.
        source: What it is, for the error's message.

    Raises:
        FormatError: It is of another format.
    """
    number = stamped.get("format", 0)
    if not isinstance(number, int) or number not in range(FORMAT + 1):
        versions = stamped.get("versions")
        by = versions.get("timm_moe_dg", "unknown") if isinstance(versions, dict) else "unknown"
        raise FormatError(
            f"{source}: has format {number!r}, and this release reads up to {FORMAT}; use the one that wrote it "
            f"(timm_moe_dg {by})"
        )


def read_arguments(path: Path, argument: str) -> Arguments:
    """Reads the arguments of a run from its args.yaml, under today's names.

    Args:
        path: The file.
        argument: Where the path comes from, for the error's message.

    Raises:
        ArgumentError: It cannot be read as such.
        FormatError: It is of another format.
    """
    table = read_yaml(str(path), argument)
    check_format(table, f"{argument}={str(path)!r}")
    return by_today_s_names(table)


def read_run_arguments(path: Path, argument: str) -> Arguments:
    """Reads what a run wrote down as its args.yaml, with the types that it has there; see `read_arguments`.

    Raises:
        ArgumentError: It cannot be read as such, or an entry has another type.
        FormatError: It is of another format.
    """
    table = read_arguments(path, argument)
    for name, value in table.items():
        if name in TYPES and value is not None and not fits(value, TYPES[name]):
            shown = reprlib.repr(value)
            remedy = f"{name}={shown} is no {type_name(TYPES[name])}; restore the file as the run has written it"
            raise ArgumentError.of(argument, str(path), remedy)
    return table


def read_repeatable(path: str, argument: str) -> Arguments:
    """Reads option values from a configuration, or from a run's args.yaml what its command line said.

    That leaves out what was filled in, which another seed or data set fills in anew.
    """
    table = read_arguments(Path(path), argument)
    filled_in = table.get("filled_in")
    left_out = [*having(ONCE), *(filled_in if isinstance(filled_in, list) else ())]
    return {name: value for name, value in table.items() if name not in left_out}
