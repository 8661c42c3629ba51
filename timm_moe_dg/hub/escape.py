"""Names that people gave, as text that a card shows and never obeys: no markup, no images, no line breaks."""

import re

# Underscores inside a word are plain to every renderer; "://" and "www." would become links
_ACTIVE = re.compile(r"[\\`*\[\]{}<>&|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.", re.ASCII)
_BREAKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


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
