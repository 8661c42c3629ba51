"""Types of option values, as JSON, YAML and Python's keywords have them."""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, get_args, get_origin

Kind = type | UnionType | list["Kind"]  # a list stands for lists of values of its type
_WORDS = {bool: "boolean", float: "number", int: "whole number", str: "text", dict: "mapping"}


def option_kind(hint: Any) -> Kind:
    """Returns the types that JSON and YAML have for the annotated values of an option."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if get_origin(parts[0]) is Sequence:
        return [option_kind(get_args(parts[0])[0])]
    kinds = {float: int | float, Mapping: dict}
    return reduce(or_, (kinds.get(get_origin(part) or part, part) for part in parts))


def described(kind: Kind) -> str:
    """Names a type in words, such as "a list of texts"."""
    item = kind[0] if isinstance(kind, list) else kind
    types = {item, *get_args(item)} - ({int} if {bool, float} & set(get_args(item)) else set())
    words = [word for type_, word in _WORDS.items() if type_ in types]
    return " or ".join(f"a {word}" for word in words) if item is kind else f"a list of {'s or '.join(words)}s"


def fits(value: object, kind: Kind) -> bool:
    """Whether a value that was read from JSON or YAML has a type."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    # To Python, True and False are whole numbers
    return isinstance(value, kind) and (not isinstance(value, bool) or bool in (kind, *get_args(kind)))
