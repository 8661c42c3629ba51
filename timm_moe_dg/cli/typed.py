"""Whether a value that was read from a file has the type that a field is annotated with."""

import types
from collections.abc import Mapping, Sequence
from typing import Union, get_args, get_origin

_WORDS: Mapping[object, str] = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def fits(value: object, annotation: object) -> bool:
    """Whether a value is of a type, as JSON and YAML hold it: a whole number is a number as well, True is none.

    Args:
        value: The value.
        annotation: str, int, float, bool, object, None's type, or a `Sequence`, a `Mapping` or a union of such.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(item, inner[1]) for item in value.values())
    if annotation is object:
        return True
    if isinstance(value, bool):
        return annotation is bool
    if annotation is float:
        return isinstance(value, int | float)
    return isinstance(annotation, type) and isinstance(value, annotation)


def type_name(annotation: object) -> str:
    """The type in words, for errors."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(one) for one in inner if one is not type(None))
    if origin is Sequence:
        return f"list ({type_name(inner[0])})"
    return "table" if origin is Mapping else _WORDS.get(annotation, str(annotation))
