"""Texts that people read: names escaped for terminals, logs, Markdown and CSV.

jinja2 escapes HTML, and PyYAML escapes YAML.
"""

import os
import re
import sys

# Underscores inside a word are plain text in every renderer. "://" and "www." would become links.
_ACTIVE = re.compile(r"[\\`*\[\]{}<>&|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.", re.ASCII)
# Line breaks, escape sequences of terminals, and characters that reorder the text around them
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_FORMULA = ("=", "+", "-", "@")
_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?%?")


def one_line(text: object) -> str:
    r"""Writes a name with escapes for control and bidirectional characters, which keep it in its place.

    >>> one_line("a\nb\x1b[31m")
    'a\\nb\\x1b[31m'
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], str(text))


def markdown(text: object) -> str:
    """Escapes Markdown markup as character references.

    >>> markdown("a|b <img src=x>")
    'a&#124;b &#60;img src=x&#62;'
    """
    return _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", one_line(text))


def code(text: object) -> str:
    """Formats a name as Markdown code: between backticks, or as HTML if it would end these or a table's cell."""
    plain = one_line(text)
    return f"<code>{markdown(plain)}</code>" if re.search(r"[`|<>&]", plain) else f"`{plain}`"


def csv_cell(name: str) -> str:
    """Escapes a name, with an apostrophe before one that a spreadsheet would take for a formula, unlike +90%.

    >>> csv_cell("=1+2"), csv_cell("-90%")
    ("'=1+2", '-90%')
    """
    name = utf8(one_line(name))
    return f"'{name}" if _is_formula(name) else name


def utf8(text: str) -> str:
    r"""Escapes the bytes of a file name that are not UTF-8, which Python holds as surrogates.

    >>> utf8("caf\udce9.png")
    'caf\\xe9.png'
    """
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def csv_path(path: str) -> str:
    """Escapes a path, with ./ before one that a spreadsheet would take for a formula.

    >>> csv_path("=1+2.png")
    './=1+2.png'
    """
    path = one_line(path)
    return os.path.join(os.curdir, path) if _is_formula(path) else path


def _is_formula(text: str) -> bool:
    return text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)


def show_line(text: str) -> None:
    """Writes a line to the standard output at once, as of a command that runs for hours."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
