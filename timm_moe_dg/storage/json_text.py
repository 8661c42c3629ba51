"""Numbers as JSON that every reader takes."""

import json
from collections.abc import Mapping
from math import isnan


def json_text(value: object, indent: int | None = None) -> str:
    """Writes a value as JSON with a line break at its end; NaN, for which JSON has no word, becomes null.

    Args:
        value: Of tables, lists, tuples, texts and numbers.
        indent: Spaces of each level; None for one line.
    """
    return json.dumps(without_nan(value), indent=indent) + "\n"


def without_nan(value: object) -> object:
    """Replaces NaN by None, in tables and lists to any depth; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value
