"""Search for images that cannot be decoded, before domains are split."""

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tqdm.auto import tqdm

from ..errors import DataError, ImageReadError
from .bands import REPAIR
from .domains import Domain
from .readers.images import count_kinds, kind_of

MAX_NAMED = 5  # messages in the log

_LOGGER = logging.getLogger(__name__)


def drop_unreadable(domains: Sequence[Domain], workers: int = 1) -> tuple[list[Domain], list[str]]:
    """Decodes every image once and leaves out those that fail. Returns the domains and a message for each such image.

    A domain that loses an image has another split, so its results do not compare with those of a complete copy.
    """
    readable: list[Domain] = []
    errors = _read_errors(domains, workers)
    for domain, unreadable in zip(domains, errors, strict=True):
        if unreadable and len(unreadable) == len(domain):
            raise DataError(f"domain={domain.name!r}: none of its {len(domain)} images can be read; {unreadable[0]}")
        readable.append(domain.without(unreadable) if unreadable else domain)
    messages = [message for unreadable in errors for message in unreadable.values()]
    if messages:
        _LOGGER.warning("%d unreadable images left out: %s", len(messages), _first(messages))
    return readable, messages


def check_readable(domains: Sequence[Domain], workers: int = 1) -> None:
    """Decodes every image once. Raises a `DataError` with the number of unreadable images."""
    errors = _read_errors(domains, workers)
    messages = [message.removesuffix(f"; {REPAIR}") for unreadable in errors for message in unreadable.values()]
    if messages:
        pairs = zip(domains, errors, strict=True)
        kinds = Counter(kind_of(domain.file(position)) for domain, unreadable in pairs for position in unreadable)
        counts = f"{len(messages)} of {sum(map(len, domains))} ({count_kinds(kinds)})"
        remedy = "repair or remove them, or give --skip-unreadable"
        raise DataError(f"images: {counts} cannot be read: {_first(messages)}; {remedy}")


def _read_errors(domains: Sequence[Domain], workers: int) -> list[dict[int, str]]:
    """Decodes every image once. Returns for each domain the positions of those that fail, with messages."""
    total = sum(map(len, domains))
    _LOGGER.info("reading all %d images once, to find those that cannot be decoded", total)
    found: list[dict[int, str]] = [{} for _ in domains]
    # Threads suffice, because Pillow's decoders release the interpreter's lock.
    with ThreadPoolExecutor(max(1, workers)) as pool, tqdm(total=total, unit="image", disable=None) as bar:
        for domain, unreadable in zip(domains, found, strict=True):
            for position, error in enumerate(pool.map(partial(_read_error, domain), range(len(domain)))):
                if error:
                    unreadable[position] = error
                bar.update()
    if not any(found):
        _LOGGER.info("all images can be read")
    return found


def _read_error(domain: Domain, position: int) -> str | None:
    try:
        domain.pixels(position)
    except ImageReadError as error:
        return str(error)
    return None


def _first(messages: Sequence[str]) -> str:
    more = f"; and {len(messages) - MAX_NAMED} more" if len(messages) > MAX_NAMED else ""
    return "; ".join(messages[:MAX_NAMED]) + more
