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
IMPORTS = "imports"
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
        raise ArgumentError.of(argument, path, "holds no table of options, such as `steps: 100`")
    return table


def parse_arguments(
    parser: ToolParser,
    argv: Sequence[str],
    saved: Path | None = None,
    read: Callable[[str, str], Options] = read_yaml,
    keywords: Options = MappingProxyType({}),
) -> argparse.Namespace:
    """Parses a command line, the YAML file that its `--config` names, and the args.yaml of a run to resume.

    The command line wins over the file of `--config`, and this one over the saved args.yaml. Keywords of a Python call
    take the place of a command line. They are those that `checked` returns.

    Raises:
        ArgumentError: A file is missing, is not a table, or has an entry that is not an option.
    """
    # A parser of --config alone, because the options in that file may be required ones
    finder = argparse.ArgumentParser(add_help=False)
    finder.add_argument("-c", "--config", default=keywords.get("config"))
    files = {"resume": saved, "config": finder.parse_known_args(argv)[0].config}
    tables = {name: read(str(path), name) for name, path in files.items() if path is not None}
    for name, table in tables.items():
        for key, value in table.items():
            if key == "config" and value is not None:
                remedy = f"names a file itself, {value!r}; write its options here"
                raise ArgumentError.of(name, str(files[name]), remedy)
            if (word := _option_name(key)) not in parser._option_string_actions:
                reason = f"{key!r} is not an option of {parser.prog}{parser.suggestion(word)}"
                raise ArgumentError.of(name, str(files[name]), reason)
    # As words, the entries of a file pass argparse's own checks: set_defaults checks neither choices nor numbers
    words = [word for table in tables.values() for entry in table.items() for word in _joined(option_words(*entry))]
    args = parser.parse_args([*words, *argv])
    vars(args).update(keywords)
    return args


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


def _joined(words: list[str]) -> list[str]:
    """Writes --name value as --name=value, so that no value is taken for an option or a positional argument."""
    return ["=".join(words)] if len(words) == 2 else words


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


_IMPORTS_HELP = "names of modules to import first, with routers, methods, data sets or losses of your own"
_IMPORTS = Declaration((), None, _IMPORTS_HELP, {})


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


def add_options(parser: argparse.ArgumentParser, title: str, *tables: "type[DataclassInstance]") -> None:
    """Adds the options of dataclasses to a parser, as a group with a title."""
    group = parser.add_argument_group(title)
    for item in (item for table in tables for item in fields(table) if _DECLARATION in item.metadata):
        declaration: Declaration = item.metadata[_DECLARATION]
        # Single letters first. Of the long spellings argparse takes the first as the attribute's name
        spellings = sorted((_option_name(item.name), *declaration.spellings), key=lambda word: word.startswith("--"))
        group.add_argument(*spellings, **_keywords(item, declaration))
        if declaration.shorthand:
            shorthand, value = declaration.shorthand
            same = f"the same as {spellings[-1]} {value}"
            group.add_argument(shorthand, action="store_const", const=value, dest=item.name, help=same)


def from_parsed(table: type[Declared], parsed: Options, **further: object) -> Declared:
    """Makes a dataclass of options from the values that argparse returned; KEY=VALUE pairs become tables.

    `further` holds the fields that are no options, such as positional arguments.
    """
    pairs = {name for name, declaration in declared(table).items() if declaration.keywords.get("type") is key_value}
    tables = {name: dict(parsed[name]) for name in pairs if parsed[name] is not None}
    values = {name: tables.get(name, parsed[name]) for name in declared(table)}
    return table(**values, **further)


def _keywords(item: "Field[Any]", declaration: Declaration) -> dict[str, Any]:
    number = {"metavar": "N" if declaration.keywords.get("type") in WHOLE_NUMBERS else "X"}
    number = number if "type" in declaration.keywords else {}
    boolean = {"action": argparse.BooleanOptionalAction} if isinstance(item.default, bool) else {}
    default = _default(item)
    given = {"required": True} if default is MISSING else {"default": default}
    return {"help": declaration.help, **given, **number, **boolean, **declaration.keywords}


def _default(item: "Field[Any]") -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def available_cpus() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# fmt: off
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


def checked(function: str, table: "type[DataclassInstance]", keywords: Options) -> dict[str, Any]:
    """Checks the keyword arguments of a Python call as argparse checks words, and returns them by field name.

    `imports`, names of modules, is among them. A None that stands for the default is left out.

    Raises:
        OptionError: There is no option of this name.
        ArgumentError: A value is of the wrong type or out of range.
    """
    declarations = {**declared(table), IMPORTS: _IMPORTS}
    kinds = {item.name: option_kind(item.type) for item in fields(table)} | {IMPORTS: [str]}
    defaults = {item.name: item.default for item in fields(table)}
    others = {other: name for name, declaration in declarations.items() for other in declaration.long_names()}
    values = {}
    for given, value in keywords.items():
        name = others.get(given, given)
        if name not in declarations:
            remedy = did_you_mean(name, [*declarations, *others]) or f"help(timm_moe_dg.{function}) lists the options"
            raise OptionError.of(name, value, f"{function} has no such option; {remedy}")
        if value is not None or defaults.get(name) is not None:
            values[name] = _checked_value(given, value, kinds[name], declarations[name].keywords)
    return values


def _checked_value(name: str, value: object, kind: Kind, keywords: Options) -> Any:
    """Checks type, choices and range of a value, and reads texts as argparse does."""
    plain, read, is_list = _plain(value), keywords.get("type"), isinstance(kind, list)
    if is_list and not isinstance(plain, list):
        plain = [plain]
    if not fits(plain, kind):
        raise ArgumentError.of(name, value, f"must be {described(kind)}")
    if isinstance(plain, dict):
        for key, item in plain.items():
            if not isinstance(key, str) or not _is_literal(item):
                raise ArgumentError.of(name, {key: item}, "give texts, numbers and lists of them by name")
        return json_object(json.dumps(plain)) if read is json_object else plain
    if plain == [] and read is position_or_name:
        plain = ["none"]  # as words name no domain
    if plain == [] and keywords.get("nargs") == "+":
        raise ArgumentError.of(name, value, "give at least one, or leave it out")
    items = [_checked_item(name, item, keywords) for item in (plain if is_list else [plain])]
    return items if is_list else items[0]


def _checked_item(name: str, item: Any, keywords: Options) -> Any:
    read, choices = keywords.get("type"), keywords.get("choices")
    if choices and item not in choices:
        raise ArgumentError.of(name, item, did_you_mean(str(item), choices) or f"choose from {', '.join(choices)}")
    if read is None or (read is position_or_name and isinstance(item, int)):
        return item
    try:
        return read(str(item))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ArgumentError.of(name, item, str(error).removeprefix(f"{str(item)!r} ")) from None


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
    rows = [(item.name, _default(item), item.type, declared(table).get(item.name)) for item in fields(table)]
    lines = []
    for name, default, hint, declaration in [*rows, (IMPORTS, (), Sequence[str], _IMPORTS)]:
        if declaration is None or name in skip:
            continue
        given = {"default": inspect.Parameter.empty if default is MISSING else default, "annotation": hint}
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **given))
        lines.append(f"    {name}: {declaration.help % {'default': default}}")
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    function.__doc__ = f"{inspect.getdoc(function)}\n\nKeyword Args:\n" + "\n".join(lines) + "\n"
