"""Command-line options: declaring them as dataclass fields, reading configuration files, and checking values."""

import argparse
import ast
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Flag
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import yaml

from ..errors import ArgumentError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_SEED = 2**32 - 1  # numpy's generators take 32 bits
Options = Mapping[str, Any]  # values by option name, as parsed or as read from YAML
Declared = TypeVar("Declared", bound="DataclassInstance")
_DECLARATION = "declaration"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast: a sweep reads many files


def parse_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line, without the program's name. Option names may have hyphens or underscores."""
    return parser.parse_args([_hyphenated(word) for word in argv])


def parse_arguments(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    saved: Path | None = None,
    read: "Callable[[str, str], Options] | None" = None,
) -> argparse.Namespace:
    """Parses a command line and the YAML file that its `--config` names. The command line wins over the file.

    Args:
        parser: Has a `--config` option.
        argv: The command line, without the program's name.
        saved: The args.yaml of a run to resume; the command line and `--config` win over it.
        read: Reads a file, given its path and the argument that named it. By default `read_yaml`.

    Raises:
        ArgumentError: A file is missing, is not a table, or has an entry that is not an option.
    """
    argv = [_hyphenated(word) for word in argv]
    command_line, _ = _config_finder().parse_known_args(argv)
    files = {"resume": saved, "config": command_line.config}
    tables = {name: (read or read_yaml)(str(path), name) for name, path in files.items() if path is not None}
    # As words, the entries of a file pass argparse's own checks: set_defaults checks neither choices nor numbers
    words = [word for table in tables.values() for entry in table.items() for word in _joined(option_words(*entry))]
    args, unknown = parser.parse_known_args([*words, *argv])
    unknown_names = {word.partition("=")[0] for word in unknown}
    for name, table in tables.items():
        for key in table:
            if _option_name(key) in unknown_names:
                raise ArgumentError.of(name, str(files[name]), f"{key!r} is not an option of {parser.prog}; see --help")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


@cache
def _config_finder() -> argparse.ArgumentParser:
    """A parser of `--config` alone, because the options in that file may be required ones."""
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("-c", "--config")
    return finder


def read_yaml(path: str, argument: str) -> Options:
    """Reads a YAML file of option names and values.

    Args:
        path: The file.
        argument: The argument that named it, for the error message.

    Raises:
        ArgumentError: The file cannot be read, or is not a table.
    """
    try:
        table = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_LOADER)
    # ValueError: bytes that are not UTF-8, or a date such as 2024-99-99
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # YAML's messages have several lines
        raise ArgumentError.of(argument, path, f"cannot be read as YAML ({reason})") from error
    if not isinstance(table, dict):
        raise ArgumentError.of(argument, path, "holds no table of options, such as `steps: 100`")
    return table


def option_words(name: str, value: object) -> list[str]:
    """Writes an option and its value as words of a command line.

    Args:
        name: With hyphens or underscores, such as test_domains.
        value: None gives no words; True and False give --name and --no-name.
    """
    option = _option_name(name)
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if option == "--hparams":  # DomainBed's form
        return [option, json.dumps(value)]
    if isinstance(value, Mapping):
        return [option, *(f"{key}={item!r}" for key, item in value.items())]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


def _joined(words: list[str]) -> list[str]:
    """Writes --name value as --name=value, so that no value is taken for an option or a positional argument."""
    return ["=".join(words)] if len(words) == 2 else words


def _option_name(name: object) -> str:
    return "--" + str(name).replace("_", "-")


def _hyphenated(word: str) -> str:
    if not word.startswith("--"):
        return word
    # Underscores in the value stay
    name, separator, value = word.partition("=")
    return name.replace("_", "-") + separator + value


@dataclass(frozen=True)
class Declaration:
    """An option's declaration, kept in the metadata of a dataclass field.

    Attributes:
        spellings: Further spellings, beside the field's name with hyphens.
        role: The option's effect on a run.
        help: Text for `--help`.
        keywords: Further arguments of argparse's `add_argument`.
        shorthand: An option that stands for one value of this one, and that value.
    """

    spellings: tuple[str, ...]
    role: Flag | None
    help: str
    keywords: Mapping[str, Any]
    shorthand: tuple[str, str] | None = None

    def long_names(self) -> list[str]:
        """Returns the further spellings as names of table entries, such as test_envs."""
        return [name.removeprefix("--").replace("-", "_") for name in self.spellings if name.startswith("--")]


def option(
    default: object,
    *spellings: str,
    help: str,
    role: Flag | None = None,
    shorthand: tuple[str, str] | None = None,
    **keywords: object,
) -> Any:
    """Declares an option as the default of a dataclass field; see `Declaration`.

    Whole numbers are shown as N in `--help`, and a boolean has the forms --name and --no-name.

    Returns:
        A field, typed as `Any`, as that of `dataclasses.field` is.
    """
    metadata = {_DECLARATION: Declaration(spellings, role, help, keywords, shorthand)}
    # A dictionary is mutable, so every instance gets its own
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(table: "type[DataclassInstance]") -> dict[str, Declaration]:
    """Returns the options of a dataclass by field name."""
    return {item.name: item.metadata[_DECLARATION] for item in fields(table) if _DECLARATION in item.metadata}


def add_options(parser: argparse.ArgumentParser, title: str, table: "type[DataclassInstance]") -> None:
    """Adds the options of a dataclass to a parser, as a group with a title."""
    group = parser.add_argument_group(title)
    for item in (item for item in fields(table) if _DECLARATION in item.metadata):
        declaration: Declaration = item.metadata[_DECLARATION]
        short = [spelling for spelling in declaration.spellings if not spelling.startswith("--")]
        long = [spelling for spelling in declaration.spellings if spelling.startswith("--")]
        spellings = [*short, _option_name(item.name), *long]
        group.add_argument(*spellings, **_keywords(item, declaration))
        if declaration.shorthand:
            shorthand, value = declaration.shorthand
            same = f"the same as {spellings[-1]} {value}"
            group.add_argument(shorthand, action="store_const", const=value, dest=item.name, help=same)


def from_parsed(table: type[Declared], parsed: Options) -> Declared:
    """Makes a dataclass of options from the values that argparse returned; KEY=VALUE pairs become tables."""
    pairs = {name for name, declaration in declared(table).items() if declaration.keywords.get("type") is key_value}
    return table(**{name: dict(parsed[name]) if name in pairs else parsed[name] for name in declared(table)})


def _keywords(item: "Field[Any]", declaration: Declaration) -> dict[str, Any]:
    whole = {"metavar": "N"} if declaration.keywords.get("type") in _WHOLE_NUMBERS else {}
    boolean = {"action": argparse.BooleanOptionalAction} if isinstance(item.default, bool) else {}
    default = item.default_factory() if callable(item.default_factory) else item.default
    return {"help": declaration.help, "default": default, **whole, **boolean, **declaration.keywords}


def position_or_name(text: str) -> int | str:
    """Reads a whole number as a position, and anything else as a name."""
    return int(text) if text.isdecimal() else text


def key_value(text: str) -> tuple[str, object]:
    """Reads KEY=VALUE. The value is a Python literal if it reads as one, and a string otherwise."""
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
    """Reads a whole number of 0 or more."""
    return _whole(text, 0, "a whole number of 0 or more")


def seed_number(text: str) -> int:
    """Reads a seed that every random generator takes."""
    return _whole(text, 0, f"a whole number from 0 to {MAX_SEED}", MAX_SEED)


def int_from_2(text: str) -> int:
    """Reads a whole number of at least 2, the fewest values that have quartiles."""
    return _whole(text, 2, "a whole number of 2 or more")


_WHOLE_NUMBERS = (int, int_from_2, non_negative_int, positive_int, seed_number)


def non_negative(text: str) -> float:
    """Reads a finite number of at least 0."""
    return _number(text, lambda value: 0 <= value < math.inf, "a number of 0 or more")


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def kilometers(text: str) -> float:
    """Reads a distance, which may be infinite."""
    return _number(text, lambda value: value >= 0, "a distance of 0 km or more, or inf")


def kilometers_or_auto(text: str) -> float | str:
    """Reads a distance, or the word auto."""
    return text if text == "auto" else kilometers(text)


def fraction(text: str) -> float:
    """Reads a number from 0 to below 1."""
    return _number(text, lambda value: 0 <= value < 1, "a number from 0 to below 1")


def fraction_to_1(text: str) -> float:
    """Reads a number above 0, at most 1."""
    return _number(text, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def _whole(text: str, least: int, description: str, most: float = math.inf) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
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


def output_file(text: str) -> Path:
    """Reads the path of a file to write, whose folder has to exist."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not in a folder that exists; make it first")
    return Path(text)


def usable_device(text: str) -> str:
    """Reads the name of a torch device that exists on this machine."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device that torch can use here: {error}") from error
    return text


def available_cpus() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a network and its weights; `load_trained` takes their values."""
    add = parser.add_argument_group("model").add_argument
    source = "local-dir:output/RUN/best, hf-hub:ORGANIZATION/NAME, or any timm model with one of the next two options"
    add("--model", required=True, metavar="NAME", help=source)
    add("--pretrained", action=argparse.BooleanOptionalAction, default=False, help="take the model's published weights")
    add("--initial-checkpoint", metavar="FILE", help="take the weights, classifier included, from this file")
    add("--img-size", type=positive_int, metavar="PIXELS", help="side of the input (default: the model's)")
    pairs = "further model arguments, such as num_experts=4 'moe_layers=(8,10)'"
    add("--model-kwargs", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=pairs)
    radius = (
        "MoGE: use the shared expert alone beyond this distance from the training data; inf disables it "
        "(default: the model's)"
    )
    add("--coverage-radius", type=kilometers, metavar="KM", help=radius)
    mode = "MoGE: compute with all experts or with the shared one alone (default: as the model was trained)"
    add("--expert-mode", choices=("routed", "shared"), help=mode)


def model_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `load_trained` from the options of `add_model_options`."""
    names = ("pretrained", "initial_checkpoint", "img_size", "coverage_radius", "expert_mode")
    return {**{name: getattr(args, name) for name in names}, "model_kwargs": dict(args.model_kwargs)}


def add_loader_options(group: argparse._ArgumentGroup) -> None:
    """Adds the batch size and the number of loader processes to a group of options."""
    batch, workers = "images (default: %(default)s)", "loader processes; 0 for none (default: %(default)s)"
    group.add_argument("-b", "--batch-size", type=positive_int, default=64, metavar="N", help=batch)
    group.add_argument("-j", "--workers", type=non_negative_int, default=2, metavar="N", help=workers)
