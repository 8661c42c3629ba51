"""Names that people gave, as text that a page or a spreadsheet shows and never obeys.

Markdown has no markup, images or line breaks of theirs, and CSV no formulas; HTML is escaped by jinja2, YAML by PyYAML.
"""

import os
import re

# Underscores inside a word are plain to every renderer; "://" and "www." would become links
_ACTIVE = re.compile(r"[\\`*\[\]{}<>&|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.", re.ASCII)
_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)?%?")


def one_line(text: object) -> str:
    """Puts a single space in the place of line breaks and control characters, and of runs of spaces."""
    return _BREAKS.sub(" ", str(text)).strip()


def markdown(text: object) -> str:
    """Writes what could be markup as character references, which all renderers show and none obeys.

    >>> markdown("a|b <img src=x>")
    'a&#124;b &#60;img src=x&#62;'
    """
    return _ACTIVE.sub(lambda match: f"&#{ord(match[0])};", one_line(text))


def code(text: object) -> str:
    """Writes a name in the type of code; between backticks where nothing in it would end them, or a table's cell."""
    plain = one_line(text)
    return f"<code>{markdown(plain)}</code>" if re.search(r"[`|<>&]", plain) else f"`{plain}`"


def csv_cell(name: str) -> str:
    """Puts an apostrophe before a name that a spreadsheet would take for a formula; numbers such as +90% are none.

    >>> csv_cell("=1+2"), csv_cell("-90%")
    ("'=1+2", '-90%')
    """
    return f"'{name}" if _is_formula(name) else name


def csv_path(path: str) -> str:
    """Writes the path of a file likewise, so that it still leads to the file.

    >>> csv_path("=1+2.png")
    './=1+2.png'
    """
    return os.path.join(os.curdir, path) if _is_formula(path) else path


def _is_formula(text: str) -> bool:
    return text.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
