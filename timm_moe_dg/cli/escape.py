"""Escapes names of files, classes and domains for Markdown and CSV. jinja2 does it for HTML, and PyYAML for YAML."""

import os
import re

# Underscores inside a word are plain text in every renderer. "://" and "www." would become links.
_ACTIVE = re.compile(r"[\\`*\[\]{}<>&|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.", re.ASCII)
_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?%?")


def one_line(text: object) -> str:
    """Replaces each run of white space and control characters by one space."""
    return _BREAKS.sub(" ", str(text)).strip()


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
    """Puts an apostrophe before a name that a spreadsheet would take for a formula. Numbers such as +90% are kept.

    >>> csv_cell("=1+2"), csv_cell("-90%")
    ("'=1+2", '-90%')
    """
    return f"'{name}" if _is_formula(name) else name


def csv_path(path: str) -> str:
    """Puts ./ before a path that a spreadsheet would take for a formula.

    >>> csv_path("=1+2.png")
    './=1+2.png'
    """
    return os.path.join(os.curdir, path) if _is_formula(path) else path


def _is_formula(text: str) -> bool:
    return text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
