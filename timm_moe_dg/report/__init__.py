"""One page of HTML about a run or a sweep, which needs nothing but itself."""

from .network_facts import Reading
from .pages import report

__all__ = ["Reading", "report"]
