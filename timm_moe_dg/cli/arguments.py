"""Options: declared as dataclass fields, and read from command lines, YAML files and keyword arguments."""

import argparse
import ast
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Flag
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import yaml

from ..errors import ArgumentError, OptionError, check_regular_file, did_you_mean
from .tool import ToolParser, recipe_file
from .values import (
    WHOLE_NUMBERS,
    Kind,
    described,
    fits,
    json_object,
    key_value,
    kilometers,
    model_source,
    non_negative_int,
    option_kind,
    position_or_name,
    positive_int,
    usable_device,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = Mapping[str, Any]  # values by option name, as parsed or as read from YAML
Declared = TypeVar("Declared", bound="DataclassInstance")
_DECLARATION = "declaration"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast: a sweep reads many files


def read_yaml(path: str, argument: str) -> Options:
    """Reads a YAML file of option names and values, or the recipe of that name.

    `argument` named it, for the error message.

    Raises:
        ArgumentError: The file cannot be read, or is not a table.
    """
    try:
        path = recipe_file(path)
        check_regular_file(path)
        table = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_LOADER)
    # ValueError: bytes that are not UTF-8, or a date such as 2024-99-99
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())  # YAML's messages have several lines
        raise ArgumentError.of(argument, path, f"cannot be read as YAML ({reason})") from error
    if not isinstance(table, dict):
        raise ArgumentError.of(argument, path, "holds no table of names and values, such as `steps: 100`")
    return table


def parse_arguments(
    parser: ToolParser,
    argv: Sequence[str],
    saved: Path | None = None,
    read: Callable[[str, str], Options] = read_yaml,
    keywords: Options = MappingProxyType({}),
) -> argparse.Namespace:
    """Parses a command line, the YAML file that its `--config` names, and the args.yaml of a run to resume.

    The command line wins over the file of `--config`, and this one over the saved args.yaml. Tables such as
    `model_kwargs` are merged. Keywords of a Python call, as `checked` returns them, take the place of a command line.

    Raises:
        ArgumentError: A file is missing, is not a table, or has an entry that is not an option.
    """
    args = parser.parse_args(argv)
    values = given_options(parser, args, saved, read, keywords)
    defaults = {name: _default(item) for name, item in parser.options.items()}
    if missing := [_option_name(name) for name in defaults if defaults[name] is MISSING and name not in values]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    vars(args).update({**defaults, **values})
    return args


def given_options(
    parser: ToolParser,
    args: argparse.Namespace,
    saved: Path | None = None,
    read: Callable[[str, str], Options] = read_yaml,
    keywords: Options = MappingProxyType({}),
) -> dict[str, Any]:
    """Returns the options that were given, by name and checked, as `parse_arguments` does."""
    words = {name: value for name, value in vars(args).items() if name in parser.options}
    try:
        values = {**checked(parser.options, words, parser.prog), **keywords}
    except ArgumentError as error:
        parser.error(str(error))
    tables = []
    for name, path in (("resume", saved), ("config", values.get("config", vars(args).get("config")))):
        if path is not None:
            table = {str(key).replace("-", "_"): value for key, value in read(str(path), name).items()}
            if table.get("config") is not None:
                remedy = f"names a file itself, {table['config']!r}; write its options here"
                raise ArgumentError.of(name, str(path), remedy)
            try:
                given = {key: value for key, value in table.items() if value is not None or key not in parser.options}
                tables.append(checked(parser.options, given, parser.prog))
            except ArgumentError as error:
                raise ArgumentError.of(name, str(path), str(error)) from None
    return merged(*tables, values)


def merged(*tables: Options) -> dict[str, Any]:
    """Merges tables of options, the later ones over the earlier; tables inside them, such as model_kwargs, as well."""
    joined: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, Mapping) and isinstance(joined.get(name), Mapping)
            joined[name] = merged(joined[name], value) if both else value
    return joined


def option_words(name: str, value: object) -> list[str]:
    """Writes an option and its value as words of a command line. None gives no words, and False gives --no-name."""
    option = _option_name(name)
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    if option in ("--test-domains", "--test-envs", "--domains") and isinstance(value, list):
        # A number alone could be taken for a domain's name, and no word at all is an error (see `domain_positions`)
        return [option, *(f"@{item}" if isinstance(item, int) else str(item) for item in value or ["none"])]
    if option == "--hparams":  # DomainBed's form
        return [option, json.dumps(value)]
    if isinstance(value, Mapping):
        return [option, *(f"{key}={item!r}" for key, item in value.items())]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


def _option_name(name: object) -> str:
    return "--" + str(name).replace("_", "-")


@dataclass(frozen=True)
class Declaration:
    """An option's declaration, kept in the metadata of a dataclass field."""

    spellings: tuple[str, ...]  # further ones, beside the field's name with hyphens
    role: Flag | None  # the option's effect on a run
    help: str
    keywords: Mapping[str, Any]  # further arguments of argparse's `add_argument`
    shorthand: tuple[str, str] | None = None  # an option that stands for one value of this one, and that value

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

    An option with the default `MISSING` has to be given. Whole numbers are shown as N in `--help`, and a boolean has
    the forms --name and --no-name.
    """
    metadata = {_DECLARATION: Declaration(spellings, role, help, keywords, shorthand)}
    # A dictionary is mutable, so every instance gets its own
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(table: "type[DataclassInstance]") -> dict[str, Declaration]:
    """Returns the options of a dataclass by field name."""
    return {item.name: item.metadata[_DECLARATION] for item in fields(table) if _DECLARATION in item.metadata}


def fields_of(*tables: "type[DataclassInstance]") -> "dict[str, Field[Any]]":
    """Returns the fields of dataclasses that are options, by name."""
    return {item.name: item for table in tables for item in fields(table) if _DECLARATION in item.metadata}


def add_options(parser: ToolParser, title: str, *tables: "type[DataclassInstance]") -> None:
    """Adds the options of dataclasses to a parser, as a group with a title. `parse_arguments` checks their values."""
    group = parser.add_argument_group(title)
    for name, item in fields_of(*tables).items():
        declaration: Declaration = item.metadata[_DECLARATION]
        # Single letters first. Of the long spellings argparse takes the first as the attribute's name
        spellings = sorted((_option_name(name), *declaration.spellings), key=lambda word: word.startswith("--"))
        group.add_argument(*spellings, **_keywords(item, declaration))
        if declaration.shorthand:
            shorthand, value = declaration.shorthand
            group.add_argument(
                shorthand,
                action="store_const",
                const=value,
                dest=name,
                default=argparse.SUPPRESS,
                help=f"the same as {spellings[-1]} {value}",
            )
    parser.options |= fields_of(*tables)


def from_parsed(table: type[Declared], parsed: Options, **further: object) -> Declared:
    """Makes a dataclass of options from the values of `parse_arguments`.

    `further` holds the fields that are no options, such as positional arguments.
    """
    return table(**{name: parsed[name] for name in declared(table)}, **further)


def _keywords(item: "Field[Any]", declaration: Declaration) -> dict[str, Any]:
    keywords = {name: value for name, value in declaration.keywords.items() if name not in ("type", "choices")}
    if "type" in declaration.keywords:
        keywords = {"metavar": "N" if declaration.keywords["type"] in WHOLE_NUMBERS else "X", **keywords}
    elif "choices" in declaration.keywords:
        keywords = {"metavar": f"{{{','.join(declaration.keywords['choices'])}}}", **keywords}
    elif isinstance(item.default, bool):
        keywords = {"action": argparse.BooleanOptionalAction, **keywords}
    return {**keywords, "help": _help(item).replace("%", "%%"), "default": argparse.SUPPRESS}


def _help(item: "Field[Any]") -> str:
    return item.metadata[_DECLARATION].help % {"default": _default(item)}


def _default(item: "Field[Any]") -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def available_cpus() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Modules of the user. Commands have --import in place of this option."""

    imports: Sequence[str] = option((), nargs="+",
        help="names of modules to import first, with routers, methods, data sets or losses of your own")


@dataclass(frozen=True, kw_only=True)
class TrainedModelOptions:
    """A trained network and its weights; `load_trained` takes their values."""

    model: str = option(MISSING, type=model_source, metavar="NAME",
        help="run folder, hf-hub:OWNER/NAME, local-dir:FOLDER, or a timm model with one of the next two options")
    pretrained: bool = option(False, help="use the published weights of a timm model")
    initial_checkpoint: str | None = option(None, metavar="FILE", help="use the weights in this file")
    img_size: int | None = option(None, type=positive_int, metavar="PIXELS",
        help="side of the input image (default: the model's)")
    model_kwargs: Mapping[str, object] = option({}, type=key_value, nargs="*", metavar="KEY=VALUE",
        help="further model arguments, such as num_experts=4 'moe_layers=(8,10)'")
    coverage_radius: float | None = option(None, type=kilometers, metavar="KM",
        help="MoGE: beyond this distance from the training locations, use the shared expert (default: the model's)")
    expert_mode: str | None = option(None, choices=("routed", "shared"),
        help="MoGE: use all experts, or the shared one only (default: as the model was trained)")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """The batch size and the number of loader processes."""

    batch_size: int = option(64, "-b", type=positive_int, help="images per batch (default: %(default)s)")
    workers: int = option(2, "-j", type=non_negative_int,
        help="processes that load images; 0 for none (default: %(default)s)")
# fmt: on


def model_keywords(options: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `load_trained` from `TrainedModelOptions`, as a dataclass or as parsed."""
    return {name: getattr(options, name) for name in declared(TrainedModelOptions) if name != "model"}


def default_device() -> str:
    """Returns the torch device for networks: a GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuse_autocast() -> None:
    """Refuses a caller within torch.autocast, which rounds logits, and whose cache keeps weights of earlier steps."""
    if torch.is_autocast_enabled(default_device()):
        remedy = "leave this context before the call; for mixed precision give finetune amp_dtype"
        raise ArgumentError.of("torch.autocast", True, remedy)


def add_device_option(add: Callable[..., Any]) -> None:
    """Adds --device by a parser's `add_argument`."""
    words = "torch device (default here: %(default)s)"
    add("--device", type=usable_device, default=default_device(), metavar="NAME", help=words)


def checked(
    options: "Mapping[str, Field[Any]]", values: Options, owner: str, *, strict: bool = False
) -> dict[str, Any]:
    """Converts raw values of options, from words, keywords or a file, and returns them by field name.

    Texts are read as on a command line, but not if `strict`. A None that stands for the default is left out.

    Args:
        options: Those of `fields_of`.
        values: Raw values by any spelling of an option.
        owner: Function or tool, for the error message.
        strict: Whether a number must be a number, as in a Python call, and a text a text.

    Raises:
        OptionError: There is no option of this name.
        ArgumentError: A value is of the wrong type or out of range.
    """
    others = {other: name for name, item in options.items() for other in item.metadata[_DECLARATION].long_names()}
    result = {}
    for given, value in values.items():
        name = others.get(given, given)
        if name not in options:
            remedy = did_you_mean(name, [*options, *others]) or "see --help, or help() of the function"
            raise OptionError.of(given, value, f"{owner} has no such option; {remedy}")
        if value is not None or options[name].default is not None:
            result[name] = _checked_value(given, value, options[name], strict)
    return result


def _checked_value(name: str, value: object, item: "Field[Any]", strict: bool) -> Any:
    """Checks type, choices and range of a value, and reads texts as words."""
    kind, keywords = option_kind(item.type), item.metadata[_DECLARATION].keywords
    plain, read = _plain(value), keywords.get("type")
    if kind is dict:
        return _checked_table(name, plain, read)
    if not isinstance(kind, list):
        return _checked_item(name, plain, kind, keywords, strict)
    items = plain if isinstance(plain, list) else [plain]
    if not items and read is position_or_name:
        return ["none"]  # as words name no domain
    if not items and keywords.get("nargs") == "+":
        raise ArgumentError.of(name, value, "give at least one, or leave it out")
    return [_checked_item(name, each, kind[0], keywords, strict) for each in items]


def _checked_table(name: str, value: Any, read: Callable[[str], Any]) -> dict[str, Any]:
    is_json = read is json_object
    try:
        if isinstance(value, str):
            value = read(value) if is_json else [value]
        if isinstance(value, list) and all(isinstance(pair, str) for pair in value) and not is_json:
            value = dict(map(read, value))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError.of(name, value, str(error)) from None
    if not isinstance(value, dict):
        raise ArgumentError.of(name, value, "must be a mapping")
    for key, item in value.items():
        if not isinstance(key, str) or not _is_literal(item):
            raise ArgumentError.of(name, {key: item}, "give texts, numbers and lists of them by name")
    return json_object(json.dumps(value)) if is_json else value


def _checked_item(name: str, item: Any, kind: Kind, keywords: Options, strict: bool) -> Any:
    read: Callable[[str], Any] | None = keywords.get("type")
    choices = keywords.get("choices")
    if choices and item not in choices:
        raise ArgumentError.of(name, item, did_you_mean(str(item), choices) or f"choose from {', '.join(choices)}")
    if fits(item, kind) and (read is None or (read is position_or_name and isinstance(item, int))):
        return item
    by_kind = next((type_ for type_ in (str, float, int) if fits(type_(), kind)), None)
    read = read or by_kind
    is_number = isinstance(item, int | float) and not isinstance(item, bool)
    # Words are texts, and names such as 2026 are numbers in a file
    is_word = isinstance(item, str) or (is_number and (fits(item, kind) or by_kind is str))
    if read is None or not is_word or (strict and not fits(item, kind)):
        raise ArgumentError.of(name, item, f"must be {described(kind)}")
    try:
        return read(str(item))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError.of(name, item, str(error).removeprefix(f"{str(item)!r} ")) from None
    except ValueError:
        raise ArgumentError.of(name, item, f"must be {described(kind)}") from None


def _plain(value: object) -> Any:
    """Turns paths into texts, sequences and arrays into lists, and numpy's numbers into Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        # Model arguments tell tuples from lists
        plain = {key: _plain(item) for key, item in value.items()}
        return {key: tuple(item) if isinstance(value[key], tuple) else item for key, item in plain.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple | range) else value


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def call_text(function: str, keywords: Mapping[str, object]) -> str:
    """Writes a call as Python code, for logs."""
    return f"timm_moe_dg.{function}({', '.join(f'{name}={value!r}' for name, value in keywords.items())})"


def describe_keywords(
    function: Callable[..., object], table: "type[DataclassInstance]", skip: Iterable[str] = ()
) -> None:
    """Gives a function that takes `**options` the signature and the docstring of the options that a table declares."""
    signature = inspect.signature(function)
    parameters = [part for part in signature.parameters.values() if part.kind is not part.VAR_KEYWORD]
    lines = []
    for name, item in fields_of(table, ImportOptions).items():
        if name not in skip:
            default = _default(item)
            given = {"default": inspect.Parameter.empty if default is MISSING else default, "annotation": item.type}
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **given))
            lines.append(f"    {name}: {_help(item)}")
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    function.__doc__ = f"{inspect.getdoc(function)}\n\nKeyword Args:\n" + "\n".join(lines) + "\n"
