"""Keyword arguments in place of a command line: the same names, defaults and checks."""

import argparse
import ast
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ArgumentError, OptionError, did_you_mean
from .arguments import declared, joined, option_words
from .imports import OPTION
from .kinds import described, fits, option_kind
from .values import json_object, key_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

IMPORTS, CONFIG = "imports", "config"


def keyword_words(function: str, table: "type[DataclassInstance]", keywords: Mapping[str, Any]) -> list[str]:
    """Writes keyword arguments as words of a command line. None stands for the default.

    Args:
        function: Name of the called function, for messages.
        table: Dataclass that declares the options.
        keywords: Options by name, and `imports`, names of modules.

    Raises:
        OptionError: There is no option of this name.
        ArgumentError: A value is of the wrong type or out of range.
    """
    declarations, words = declared(table), []
    kinds = {item.name: option_kind(item.type) for item in fields(table)}
    defaults = {CONFIG: None, **{item.name: item.default for item in fields(table)}}
    others = {other: name for name, declaration in declarations.items() for other in declaration.long_names()}
    for given, value in keywords.items():
        name = others.get(given, given)
        if name == IMPORTS:
            modules = [value] if isinstance(value, str) else plain_value(value)
            if not fits(modules, [str]):
                raise ArgumentError.of(name, value, "must be a list of texts, the names of modules")
            words += [f"{OPTION}={module}" for module in modules]
            continue
        if name not in declarations and name != CONFIG:
            nearest = did_you_mean(name, [*declarations, *others, IMPORTS])
            remedy = nearest or f"help(timm_moe_dg.{function}) lists the options"
            raise OptionError.of(name, value, f"{function} has no such option; {remedy}")
        if value is None and defaults[name] is None:
            continue
        plain, kind = plain_value(value), kinds.get(name, str)
        if isinstance(kind, list) and not isinstance(plain, list):
            plain = [plain]
        if not fits(plain, kind):
            raise ArgumentError.of(given, value, f"must be {described(kind)}")
        if name in declarations:
            _check_values(given, plain, declarations[name].keywords)
        words += joined(option_words(name, plain))
    return words


def plain_value(value: object) -> Any:
    """Turns paths into texts, sequences and arrays into lists, and numpy's numbers into Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        # Model arguments tell tuples from lists
        plain = {key: plain_value(item) for key, item in value.items()}
        return {key: tuple(item) if isinstance(value[key], tuple) else item for key, item in plain.items()}
    return [plain_value(item) for item in value] if isinstance(value, list | tuple | range) else value


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
    for item in (item for item in fields(table) if item.name in declared(table) and item.name not in set(skip)):
        default = item.default_factory() if callable(item.default_factory) else item.default
        empty = inspect.Parameter.empty
        given = {"default": empty if default is MISSING else default, "annotation": item.type}
        parameters.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, **given))
        lines.append(f"    {item.name}: {declared(table)[item.name].help % {'default': default}}")
    words = "Names of modules to import first, with routers, methods, data sets or losses of your own."
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters.append(inspect.Parameter(IMPORTS, kind, default=(), annotation=Sequence[str]))
    lines.append(f"    {IMPORTS}: {words}")
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    function.__doc__ = f"{inspect.getdoc(function)}\n\nKeyword Args:\n" + "\n".join(lines) + "\n"


def _check_values(name: str, value: Any, keywords: Mapping[str, Any]) -> None:
    """Checks choices and ranges as argparse does, and that a table can be written as text."""
    read, choices = keywords.get("type"), keywords.get("choices")
    if read in (key_value, json_object):
        for key, item in value.items():
            if not isinstance(key, str) or not _is_literal(item):
                raise ArgumentError.of(name, {key: item}, "give texts, numbers and lists of them by name")
        return
    for item in value if isinstance(value, list) else [value]:
        if choices and item not in choices:
            question = did_you_mean(str(item), choices)
            raise ArgumentError.of(name, item, question or f"choose from {', '.join(choices)}")
        try:
            _ = read(str(item)) if read else item
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ArgumentError.of(name, item, str(error).removeprefix(f"{str(item)!r} ")) from None


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False
