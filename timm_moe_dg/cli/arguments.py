"""Command lines of the tools: either spelling of an option, configuration files, KEY=VALUE and JSON values."""

import argparse
import ast
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from ..errors import ArgumentError

MOST_CORES = 1024
MOST_SEED = 2**32 - 1
DIGITS = 18  # of whole numbers that fit into 64 bits
FLAT = 300  # characters of a YAML file that may open a table or a list; more than any run writes
Arguments = Mapping[str, Any]  # options by name; a value is whatever its type reads, or JSON and YAML hold


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line, without the program's name, whose options may be spelled with hyphens or underscores."""
    return parser.parse_args([_hyphenated(word) for word in argv])


def parse_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    saved: Path | None = None,
    read: Callable[[str, str], Arguments] | None = None,
) -> argparse.Namespace:
    """Parses a command line whose options may be spelled with hyphens or underscores.

    A file given with `--config` supplies values for options that the command line does not mention: its entries are put
    before the command line's own, so they pass the same checks and the later ones win.

    Args:
        parser: Has a `--config` option.
        argv: The command line, without the program's name.
        saved: A file like that of `--config`, of the run that `--resume` names; both win over it.
        read: Reads such a file; given the path, and the name of the argument for errors. By default `read_yaml`.

    Raises:
        ArgumentError: A configuration file is missing, is not a table, or has an entry that is no option.
    """
    argv = [_hyphenated(word) for word in argv]
    known, _ = _config_finder().parse_known_args(argv)
    files = {"resume": saved, "config": known.config}  # argument -> path
    found = [(name, str(path)) for name, path in files.items() if path is not None]
    tables = [(name, path, (read or read_yaml)(path, name)) for name, path in found]
    words = [word for name, path, table in tables for word in table_words(parser, table, name, path)]
    return parser.parse_args([*words, *argv])


@cache
def _config_finder() -> argparse.ArgumentParser:
    """Looks for `--config` alone: the whole parser would ask for what the file is to supply."""
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("-c", "--config")
    return finder


def read_yaml(path: str, argument: str) -> Arguments:
    """Reads a YAML file of names and values.

    Args:
        path: The file.
        argument: Where the path comes from, for the error's message.

    Raises:
        ArgumentError: It cannot be read, or is no table.
    """
    try:
        table = _parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (
        OSError,
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: no text, or a date like 99-99-99
        reason = " ".join(str(error).split())  # YAML's own take several lines
        raise ArgumentError.of(argument, path, f"cannot be read as YAML ({reason})") from error
    if not isinstance(table, dict):
        raise ArgumentError.of(argument, path, "holds no table of options, such as `steps: 100`")
    return table


def _parse_yaml(text: str) -> object:
    """Parses YAML: with libyaml, ten times as fast, where nothing is nested so deeply that its recursion could crash.

    What that refuses is left to the other parser, so that messages are the same on every machine.
    """
    if yaml.__with_libyaml__ and sum(map(text.count, "[{-?:")) < FLAT:
        with suppress(yaml.YAMLError):
            return yaml.load(text, Loader=yaml.CSafeLoader)
    return yaml.safe_load(text)


def table_words(parser: argparse.ArgumentParser, table: Arguments, argument: str, source: str) -> list[str]:
    """Turns option names and values into words of a command line.

    Args:
        parser: Knows the options.
        table: Option name, with hyphens or underscores, -> value; None leaves an option out.
        argument: Where the table comes from, for the error's message: the argument...
        source: ...and its value.

    Raises:
        ArgumentError: A name is no option.
    """
    # Reversed, so that of several ways to set a value the first in --help counts
    options = {action.dest: action for action in reversed(parser._actions) if action.option_strings}
    others = {spelling: action for action in options.values() for spelling in action.option_strings}
    options = {spelling.lstrip("-").replace("-", "_"): action for spelling, action in others.items()} | options
    words: list[str] = []
    for key, value in table.items():
        action = options.get(str(key).replace("-", "_"))
        if action is None or action.dest == "help":
            raise ArgumentError.of(argument, source, f"{key!r} is no option of {parser.prog}; see --help")
        words += _option_words(action, value)
    return words


def position_or_name(text: str) -> int | str:
    """Reads a whole number as such, and anything else as a name."""
    return int(text) if text.isdecimal() else text


def key_value(text: str) -> tuple[str, object]:
    """Reads KEY=VALUE; the value is a Python literal if it reads as one, and a string otherwise."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE, such as num_experts=4")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def json_object(text: str) -> dict[str, object]:
    """Reads a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"lr\": 1e-4}}'")
    return value


def positive_int(text: str) -> int:
    """Reads a whole number above zero."""
    return _whole(text, 1, "a whole number above zero")


def non_negative_int(text: str) -> int:
    """Reads a whole number, 0 included."""
    return _whole(text, 0, "a whole number of 0 or more")


def processes(text: str) -> int:
    """Reads a number of loader processes, 0 for none; no more than any machine has cores."""
    return _whole(text, 0, f"a whole number from 0 to {MOST_CORES}", MOST_CORES)


def available_cpus() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads(text: str) -> int:
    """Reads a number of threads; OpenMP's runtime ends a process that asks it for millions."""
    return _whole(text, 1, f"a whole number from 1 to {MOST_CORES}", MOST_CORES)


def seed_number(text: str) -> int:
    """Reads a seed that every generator takes: numpy's have 32 bits."""
    return _whole(text, 0, f"a whole number from 0 to {MOST_SEED}", MOST_SEED)


def int_from_2(text: str) -> int:
    """Reads a whole number of at least 2, the fewest values that have quartiles."""
    return _whole(text, 2, "a whole number of 2 or more")


def output_file(text: str) -> Path:
    """Reads the path of a file to write at the end; its folder has to be there from the start."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not in a folder that exists; make it first")
    return Path(text)


def usable_device(text: str) -> str:
    """Reads the name of a torch device that a tensor can be on here."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device that torch can use here: {error}") from error
    return text


def non_negative(text: str) -> float:
    """Reads a finite number of at least 0."""
    return _number(text, lambda value: 0 <= value < math.inf, "a number of 0 or more")


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def kilometers(text: str) -> float:
    """Reads a distance; inf is one."""
    return _number(text, lambda value: value >= 0, "a distance of 0 km or more, or inf")


def kilometers_or_auto(text: str) -> float | str:
    """Reads a distance, or the word auto."""
    return text if text == "auto" else kilometers(text)


def fraction(text: str) -> float:
    """Reads a number from 0 up to, but without, 1."""
    return _number(text, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def fraction_to_1(text: str) -> float:
    """Reads a number above 0, at most 1."""
    return _number(text, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def _whole(text: str, least: int, description: str, most: float = math.inf) -> int:
    if not text.isdecimal() or len(text) > DIGITS or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
    return int(text)


def _number(text: str, fits: Callable[[float], bool], description: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
    return value


def _hyphenated(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, separator, value = word.partition("=")
    return name.replace("_", "-") + separator + value


def option_words(option: str, value: object, pairs: bool = False) -> list[str]:
    """Turns an option's value into words of a command line.

    Args:
        option: Such as --steps.
        value: None leaves the option out; True and False become --option and --no-option.
        pairs: Write a table as KEY=VALUE words rather than as one JSON object.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [option, *(f"{key}={item!r}" for key, item in value.items())] if pairs else [option, json.dumps(value)]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


def _option_words(action: argparse.Action, value: object) -> list[str]:
    option = next(option for option in action.option_strings if option.startswith("--"))
    return option_words(option, value, pairs=action.nargs is not None)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which network, and from where; `load_trained` takes their values."""
    add = parser.add_argument_group("model").add_argument
    source = "local-dir:output/RUN/best, hf-hub:ORGANIZATION/NAME, or any timm model with one of the next two options"
    add("--model", required=True, metavar="NAME", help=source)
    add("--pretrained", action=argparse.BooleanOptionalAction, default=False, help="take the model's published weights")
    add("--initial-checkpoint", metavar="FILE", help="take the weights, classifier included, from this file")
    add("--img-size", type=positive_int, metavar="PIXELS", help="side of the input (default: the model's)")
    pairs = "further model arguments, such as num_experts=4 'moe_layers=(8,10)'"
    add("--model-kwargs", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=pairs)
    reach = "MoGE: farther than this from all training coordinates the shared expert answers; inf: nowhere"
    add("--coverage-radius", type=kilometers, metavar="KM", help=f"{reach} (default: the model's)")
    verify = "compare the files of a local-dir: model with the checksums that a run wrote (default: on)"
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help=verify)


def add_loader_options(group: argparse._ArgumentGroup) -> None:
    """Adds how images are loaded to a group: how many at a time, and by how many processes."""
    batch, workers = "images (default: %(default)s)", "loader processes; 0 for none (default: %(default)s)"
    group.add_argument("-b", "--batch-size", type=positive_int, default=64, metavar="N", help=batch)
    group.add_argument("-j", "--workers", type=processes, default=2, metavar="N", help=workers)
