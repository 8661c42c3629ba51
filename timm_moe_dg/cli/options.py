"""Options declared as fields of a frozen dataclass: default, spellings, type, role and help of each in one place."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Flag
from typing import TYPE_CHECKING, Any, TypeVar

from .arguments import Arguments, int_from_2, key_value, non_negative_int, positive_int, processes, seed_number, threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Declared = TypeVar("Declared", bound="DataclassInstance")
_DECLARATION = "declaration"
_WHOLE = (int, int_from_2, non_negative_int, positive_int, processes, seed_number, threads)


@dataclass(frozen=True)
class Declaration:
    """What a field's metadata says about an option.

    Attributes:
        spellings: Beside the field's own name with hyphens; earlier names of an option stay valid so.
        role: What the option has a part in.
        help: In `--help`.
        how: Further arguments of argparse's `add_argument`; whole numbers are shown as N, and booleans have two forms.
        shorthand: An option that stands for one value of this one, and that value.
    """

    spellings: tuple[str, ...]
    role: Flag | None
    help: str
    how: Mapping[str, object]
    shorthand: tuple[str, str] | None = None

    def long_names(self) -> list[str]:
        """The further spellings as names of a table's entries, such as test_envs."""
        return [_as_name(spelling) for spelling in self.spellings if spelling.startswith("--")]


def option(
    default: object,
    *spellings: str,
    help: str,
    role: Flag | None = None,
    shorthand: tuple[str, str] | None = None,
    **how: object,
) -> Any:
    """Declares an option as the default of a dataclass's field; see `Declaration`.

    Returns:
        What `dataclasses.field` returns; of any type, as there.
    """
    metadata = {_DECLARATION: Declaration(spellings, role, help, how, shorthand)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(table: "type[DataclassInstance]") -> dict[str, Declaration]:
    """Returns the options of a dataclass by field name."""
    return {one.name: one.metadata[_DECLARATION] for one in fields(table) if _DECLARATION in one.metadata}


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    table: "type[DataclassInstance]",
) -> None:
    """Adds the options of a dataclass to a parser.

    Args:
        parser: The parser.
        title: Of the group that they are shown in.
        table: The dataclass.
    """
    group = parser.add_argument_group(title)
    for one in (one for one in fields(table) if _DECLARATION in one.metadata):
        declaration: Declaration = one.metadata[_DECLARATION]
        words = _spellings(one.name, declaration)
        group.add_argument(*words, **_keywords(one, declaration))
        if declaration.shorthand:
            spelling, value = declaration.shorthand
            same = f"the same as {words[-1]} {value}"
            group.add_argument(spelling, action="store_const", const=value, dest=one.name, help=same)


def from_parsed(table: type[Declared], parsed: Arguments) -> Declared:
    """Takes over the values that argparse found, by name; KEY=VALUE pairs become tables."""
    keywords = {name: declaration.how.get("type") for name, declaration in declared(table).items()}
    values = {name: parsed[name] for name in keywords}
    return table(**{name: dict(value) if keywords[name] is key_value else value for name, value in values.items()})


def _spellings(name: str, declaration: Declaration) -> Sequence[str]:
    """Short ones first, then the name, then the others, as --help shows them."""
    short = [spelling for spelling in declaration.spellings if not spelling.startswith("--")]
    long = [spelling for spelling in declaration.spellings if spelling.startswith("--")]
    return [*short, f"--{name.replace('_', '-')}", *long]


def _keywords(one: "Field[Any]", declaration: Declaration) -> dict[str, Any]:
    whole = {"metavar": "N"} if declaration.how.get("type") in _WHOLE else {}
    keywords: dict[str, Any] = {"help": declaration.help, **whole, **declaration.how}
    if isinstance(one.default, bool):
        keywords |= {"action": argparse.BooleanOptionalAction}
    keywords["default"] = one.default_factory() if callable(one.default_factory) else one.default
    return keywords


def _as_name(spelling: str) -> str:
    return spelling.removeprefix("--").replace("-", "_")
