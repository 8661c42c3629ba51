"""A Hub that cannot be reached is told at once: its client would try for half a minute, a message each time."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError

SECONDS = 5.0  # for an answer of whatever kind
# What the client's HTTP library raises
_HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])
_logger = logging.getLogger(__name__)


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Lets the Hub's client look into its cache alone, while this is entered, if the Hub does not answer."""
    if constants.HF_HUB_OFFLINE or _answers():
        yield
        return
    _logger.warning(f"the Hub ({constants.ENDPOINT}) cannot be reached; looking for its files in the cache")
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except (_HTTP_ERROR, OSError):
        return False
    return True
