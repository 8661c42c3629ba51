"""Names of classes and domains: one form of their letters, and names that differ by spelling alone."""

import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from decimal import Decimal

from ..errors import DataError

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.IGNORECASE)
_LOGGER = logging.getLogger(__name__)


def normalized(name: str) -> str:
    """Returns the composed form of a name (Unicode's NFC). Archives of macOS hold the decomposed one."""
    return unicodedata.normalize("NFC", name)


def places_of(names: Iterable[str], places: Iterable[str]) -> Mapping[str, Collection[str]]:
    """Returns for each name the places of the rows that have it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, place in zip(names, places, strict=True):
        found[name].add(place)
    return found


def check_spellings(source: str, places: Mapping[str, Collection[str]], kind: str = "classes") -> None:
    """Compares the names of classes, each with the names of the domains that hold images of it, or other names.

    Names that differ by spaces, invisible characters or the form of a number, such as "1" and "1.0", are a `DataError`.
    So are names that differ by case or punctuation and occur in no domain together. Otherwise these are a warning.
    """
    for plain in (_visible, _loose):
        alike = defaultdict(list)
        for name in places:
            alike[plain(name)].append(name)
        for names in (names for names in alike.values() if len(names) > 1):
            apart = not set.intersection(*(set(places[name]) for name in names))
            show = repr if len({*map(normalized, names)}) == len(names) else ascii
            listing = ", ".join(f"{show(name)} in {listed(places[name])}" for name in names)
            message = f"{source}: these {kind} differ by spelling alone: {listing}"
            if plain is _visible or apart:
                raise DataError(f"{message}; give them one name")
            _LOGGER.warning("%s; they count as different %s", message, kind)


def _visible(name: str) -> str:
    """What a reader sees of a name: single spaces, no invisible characters, numbers without zeros at their ends."""
    shown = "".join(letter for letter in normalized(name) if unicodedata.category(letter) != "Cf")
    shown = " ".join(shown.split())
    return str((Decimal(shown) + 0).normalize()) if _NUMBER.fullmatch(shown) else shown


def _loose(name: str) -> str:
    return re.sub(r"[\s_]+|(?<=\w)-(?=\w)", " ", unicodedata.normalize("NFKC", _visible(name)).casefold())


def listed(domains: Collection[str], limit: int = 3) -> str:
    """Joins the first names, and counts the others."""
    names = sorted(domains)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
