"""Leaving out images that cannot be decoded, before domains are split."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..errors import DataError, ImageReadError
from .domains import Domain

SHOWN = 5

_LOGGER = logging.getLogger(__name__)


def drop_unreadable(domains: Sequence[Domain], workers: int = 1) -> tuple[list[Domain], list[str]]:
    """Decodes every image once and leaves out those that fail.

    A domain that loses an image is split differently from then on, so that its results do not compare with those of a
    complete copy; nothing changes where all images can be read.

    Args:
        domains: All domains of a benchmark.
        workers: Threads to read with.

    Returns:
        The domains, and what was wrong with each image that was left out; the messages name the files.

    Raises:
        DataError: No image of a domain can be read.
    """
    _LOGGER.info("reading all %d images once, to find those that cannot be decoded", sum(map(len, domains)))
    kept: list[Domain] = []
    complaints: list[str] = []
    for domain in domains:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            answers = list(pool.map(partial(_complaint, domain), range(len(domain))))
        bad = {position: answer for position, answer in enumerate(answers) if answer}
        if len(bad) == len(domain):
            raise DataError(f"domain={domain.name!r}: none of its {len(domain)} images can be read; {answers[0]}")
        kept.append(domain.without(bad) if bad else domain)
        complaints += bad.values()
    _report(complaints)
    return kept, complaints


def _complaint(domain: Domain, position: int) -> str | None:
    try:
        domain.image(position)
    except ImageReadError as error:
        return str(error)
    return None


def _report(complaints: Sequence[str]) -> None:
    if not complaints:
        _LOGGER.info("all images can be read")
        return
    more = f"; and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
    _LOGGER.warning("%d unreadable images left out: %s%s", len(complaints), "; ".join(complaints[:SHOWN]), more)
