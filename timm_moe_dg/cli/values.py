"""Values of options: functions that read a word and check it, for argparse, and the types of JSON, YAML and Python."""

import argparse
import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import timm
import torch

LOCAL = "local-dir:"  # timm's source of models in a folder
TEXT = "text:"  # classifiers made of text embeddings
_YAML = {"true": True, "false": False, "null": None}  # a text such as "false" would count as true
Kind = type | UnionType | list["Kind"]  # a list stands for lists of values of its type
_WORDS = {bool: "boolean", float: "number", int: "whole number", str: "text", dict: "mapping"}
MAX_SEED = 2**32 - 1  # numpy's generators take 32 bits


def position_or_name(text: str) -> int | str:
    """Reads @I as the position I. Any other text is a domain's name, or a position that is no name."""
    return int(text[1:]) if text.startswith("@") and text[1:].removeprefix("-").isdecimal() else text


def key_value(text: str) -> tuple[str, object]:
    """Reads KEY=VALUE. The value is a literal of Python or YAML if it reads as one, and a string otherwise."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE, such as num_experts=4")
    if value in _YAML:
        return key, _YAML[value]
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key, value


def json_object(text: str) -> dict[str, object]:
    """Reads a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"lr\": 1e-4}}'")
    return value


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Makes a function that reads a whole number in a range."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from {least} to {most}")
        return int(text)

    return read


positive_int = _whole(1)
non_negative_int = _whole(0)
int_from_2 = _whole(2)  # the fewest values that have quartiles
seed_number = _whole(0, MAX_SEED)
WHOLE_NUMBERS = (int, int_from_2, non_negative_int, positive_int, seed_number)


def _number(description: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Makes a function that reads a number in a range. NaN fits no range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
        return value

    return read


non_negative = _number("a number of 0 or more", lambda value: 0 <= value < math.inf)
positive = _number("a number above 0", lambda value: 0 < value < math.inf)
kilometers = _number("a distance of 0 km or more, or inf", lambda value: value >= 0)
fraction = _number("a number from 0 to below 1", lambda value: 0 <= value < 1)
share = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)
between = _number("a number above 0 and below 1", lambda value: 0 < value < 1)
fraction_to_1 = _number("a number above 0, at most 1", lambda value: 0 < value <= 1)


def kilometers_or_auto(text: str) -> float | str:
    """Reads a distance, or the word auto."""
    return text if text == "auto" else kilometers(text)


def shard_text(text: str) -> str:
    """Reads I/N, the share I from 0 to N - 1 of N."""
    index, _, total = text.partition("/")
    if not (index.isdecimal() and total.isdecimal() and int(index) < int(total)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form I/N with I from 0 to N - 1, such as 0/100")
    return text


def model_source(text: str) -> str:
    """Reads a model. RUN and RUN/best, with or without `local-dir:`, name the selected network or ensemble of a run."""
    folder = Path(text.removeprefix(LOCAL))
    for place in (folder / "best", folder):
        # A timm model stays one, even if there is a folder of that name
        if holds_network(place) and not timm.is_model(text):
            return f"{LOCAL}{place}"
    if folder.name.startswith("best_") and not folder.exists() and (folder.parent / "args.yaml").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} was not saved; see --save-rules of finetune, or take best")
    return text


def weights_file(text: str) -> str:
    """Reads a file of weights. RUN and RUN/best stand for those of the selected network of a run."""
    file = Path(model_source(text).removeprefix(LOCAL), "model.safetensors")
    return str(file) if file.is_file() else text


def holds_network(folder: Path) -> bool:
    """Whether a folder holds a network in timm's format, or an ensemble of several in numbered folders."""
    return any((folder / member / "config.json").is_file() for member in ("", "0"))


def run_folder(text: str) -> Path:
    """Reads the folder of a run, or of several, from RUN, RUN/best or local-dir:RUN/best."""
    folder = Path(model_source(text).removeprefix(LOCAL))
    is_best = folder.name == "best" and (folder / "config.json").is_file()
    return folder.parent if is_best else Path(text.removeprefix(LOCAL))


def output_file(text: str) -> Path:
    """Reads the path of a file to write, whose folder has to exist."""
    if not Path(text).parent.is_dir() or Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists; make the folder first")
    return Path(text)


def text_file(text: str) -> str:
    """Reads text:FILE."""
    if not text.startswith(TEXT) or text == TEXT:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {TEXT}FILE; see examples/text_head.py")
    return text


def folder_name(text: str) -> str:
    """Reads the name of a folder to make below another one. Names of locks and temporary files add 7 bytes to it."""
    path = Path(text)
    if not path.name or path.is_absolute() or ".." in path.parts or not text.isprintable() or len(text.encode()) > 240:
        remedy = "must be a relative path of at most 240 bytes, without '..' or control characters"
        raise argparse.ArgumentTypeError(f"{text!r} {remedy}")
    return text


def usable_device(text: str) -> str:
    """Reads the name of a torch device that exists on this machine."""
    try:
        torch.empty(0, device=text)
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device that torch can use here: {error}") from error
    return text


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
