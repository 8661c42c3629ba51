"""Removal of images that cannot be decoded, before domains are split."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..errors import DataError, ImageReadError
from .domains import Domain

MAX_NAMED = 5  # messages in the log

_LOGGER = logging.getLogger(__name__)


def drop_unreadable(domains: Sequence[Domain], workers: int = 1) -> tuple[list[Domain], list[str]]:
    """Decodes every image once and leaves out those that fail. Returns the domains and a message for each such image.

    A domain that loses an image has another split, so its results do not compare with those of a complete copy.

    Raises:
        DataError: No image of a domain can be read.
    """
    _LOGGER.info("reading all %d images once, to find those that cannot be decoded", sum(map(len, domains)))
    readable: list[Domain] = []
    messages: list[str] = []
    for domain in domains:
        # Threads suffice, because Pillow's decoders release the interpreter's lock.
        with ThreadPoolExecutor(max(1, workers)) as pool:
            errors = list(pool.map(partial(_read_error, domain), range(len(domain))))
        unreadable = {position: error for position, error in enumerate(errors) if error}
        if len(unreadable) == len(domain):
            raise DataError(f"domain={domain.name!r}: none of its {len(domain)} images can be read; {errors[0]}")
        readable.append(domain.without(unreadable) if unreadable else domain)
        messages += unreadable.values()
    _log(messages)
    return readable, messages


def _read_error(domain: Domain, position: int) -> str | None:
    try:
        domain.image(position)
    except ImageReadError as error:
        return str(error)
    return None


def _log(messages: Sequence[str]) -> None:
    if not messages:
        _LOGGER.info("all images can be read")
        return
    more = f"; and {len(messages) - MAX_NAMED} more" if len(messages) > MAX_NAMED else ""
    _LOGGER.warning("%d unreadable images left out: %s%s", len(messages), "; ".join(messages[:MAX_NAMED]), more)
